"""Clients are spread over ranks by what they are measured to take."""
