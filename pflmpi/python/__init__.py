"""`pflmpi.run` and `pflmpi.submit`: runs started from a notebook or a script."""
