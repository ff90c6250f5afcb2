"""`baton plan act`: change a running cluster's roles, and on Ray its number of nodes."""
