"""What the server itself costs: a null engine behind real processes and sockets."""
