"""Computations of one client: the task, its data, losses, training."""
