"""metrics.csv of a run, and what checkpoints hold of it."""
