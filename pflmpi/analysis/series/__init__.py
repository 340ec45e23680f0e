"""The numbers behind each figure of a report, one file for each topic."""
