"""Leaves of which all rows are the same: stored once, and shown as a row of every client."""
