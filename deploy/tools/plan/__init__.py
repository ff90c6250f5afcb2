"""`baton plan`: how many prefill and decode nodes, measured on this machine and simulated at any size."""
