"""`baton plan`: find how many prefill and decode nodes to run."""
