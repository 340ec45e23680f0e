"""What the commands do, behind the parser in `cli`."""
