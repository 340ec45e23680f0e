"""Slurm: batch scripts, and what its queue says."""
