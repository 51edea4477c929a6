"""What the layers of a model remember of a request between steps, by request slot."""
