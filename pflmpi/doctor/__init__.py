"""Checks the environment before a run: collects facts on every rank, checks them on rank 0, and prints tables."""
