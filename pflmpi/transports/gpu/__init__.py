"""Messages between GPUs."""
