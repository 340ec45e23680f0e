"""How a rank computes its clients: one after another (`loop`) or many in one vmapped call (`lanes`)."""
