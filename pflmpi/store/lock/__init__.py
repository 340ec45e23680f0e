"""The lock of a run, and who holds it."""
