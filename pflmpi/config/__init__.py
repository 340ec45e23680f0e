"""Configurations: YAML to checked values."""
