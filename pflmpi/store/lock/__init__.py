"""The lock of a run, who holds it, and who waits to join."""
