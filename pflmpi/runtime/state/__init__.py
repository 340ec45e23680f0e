"""The persistent state of the clients of a rank."""
