"""`baton plan`: find how many prefill and decode nodes to run, by measuring this machine and simulating any size."""
