"""`baton load`: load on any OpenAI-compatible server, what its users would see, and whether what they see is true."""
