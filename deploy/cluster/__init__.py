"""Start, watch, stop and change the processes of one machine's cluster, and its keys."""
