"""The commands of `pflmpi`, a file each, named as typed; see `cli`."""
