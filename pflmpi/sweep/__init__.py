"""Sweeps: the cells of a table, what each still needs, and the processes that run them."""
