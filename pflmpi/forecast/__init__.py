"""What a run will need, said before it starts: memory, bytes, disk and seconds."""
