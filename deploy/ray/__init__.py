"""`baton ray`: run a cluster on Ray. An actor starts, watches and stops each process. Requests bypass Ray."""
