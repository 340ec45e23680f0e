"""What the commands share that run on ranks: how many there are, where each is, from its start to its end."""
