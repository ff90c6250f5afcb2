"""The command `baton`, which starts clusters and has tools. Clients' requests do not pass through this package."""
