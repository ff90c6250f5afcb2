"""`baton prove`: run the same requests in every way that nodes can, and compare the tokens."""
