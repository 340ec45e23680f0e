"""What the server and the clients exchange in a round."""
