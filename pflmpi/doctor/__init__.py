"""Problems of the environment, found before a run: facts of every rank are collected, checked, and shown as a table."""
