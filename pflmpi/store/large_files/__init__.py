"""Files that are too large to be made in memory."""
