"""`baton prove`: the same requests in every way the nodes can run them, and whether the tokens are the same."""
