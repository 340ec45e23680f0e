"""Figures across runs: a small drawing for each run, on common axes."""
