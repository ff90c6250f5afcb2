"""Start, watch, change and stop one machine's cluster, and make its keys."""
