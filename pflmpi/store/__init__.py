"""A run on disk: HDF5 files that appear atomically and are checked when they are read; see docs/checkpoint.md.

Other programs find the clients' rows by the virtual datasets of a round file; the functions here go to the shards
through its layout, and check all of it.
"""
