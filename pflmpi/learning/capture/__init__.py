"""Replayed steps captured as one launch each."""
