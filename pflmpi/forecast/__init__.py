"""Predicts memory, traffic, disk and seconds of a run before it starts."""
