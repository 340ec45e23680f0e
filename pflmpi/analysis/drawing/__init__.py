"""Figures from plots: matplotlib's `Figure` objects, without a screen and without pyplot's global state."""
