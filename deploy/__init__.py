"""The command `baton`: it starts clusters and runs tools. Clients' requests do not pass through this package."""
