"""What one client computes: the task, its data, losses, training."""
