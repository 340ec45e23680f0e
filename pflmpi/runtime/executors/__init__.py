"""Executors compute the clients of a rank: one after another (`loop`) or many in one vmapped call (`lanes`)."""
