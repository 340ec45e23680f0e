"""What travels between the server and the clients."""
