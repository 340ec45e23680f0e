"""Scaling experiments: one configuration on several numbers of ranks, what was measured, and what follows from that."""
