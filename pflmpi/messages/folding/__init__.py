"""The exact sums of the participants' messages, and the way that they take to rank 0."""
