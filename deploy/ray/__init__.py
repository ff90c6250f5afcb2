"""`baton ray`: run a cluster on Ray, with an actor for each process. Requests bypass Ray."""
