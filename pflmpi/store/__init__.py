"""A run on disk: HDF5 files that appear atomically and are verified when they are read; see docs/checkpoint.md.

Other programs read the clients' rows through the virtual datasets of a round file; the functions here read the shards
directly, by the layout in the round file, and verify every checksum.
"""
