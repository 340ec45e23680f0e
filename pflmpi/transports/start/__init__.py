"""Starting the ranks of a run on this machine: as forks of a process, or as new processes."""
