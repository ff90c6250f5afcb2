"""The set-up, the command `baton`, clusters and tools. Clients' requests do not pass through here."""
