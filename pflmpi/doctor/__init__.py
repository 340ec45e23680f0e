"""Checks the environment before a run: collects facts of every rank, checks them, and prints tables."""
