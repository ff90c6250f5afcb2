"""`baton prove`: run the same requests in every way that nodes support, and compare tokens."""
