"""What would break a run here: facts of every rank are collected, judged and shown, each apart from the others."""
