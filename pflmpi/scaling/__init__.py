"""Scaling experiments: one configuration measured on several numbers of ranks."""
