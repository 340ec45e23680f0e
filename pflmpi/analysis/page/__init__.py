"""The page of a report: what is on it, its HTML, and its script."""
