"""Runs started from Python: `pflmpi.run`, in a notebook or under a launcher."""
