"""Starts, watches and stops: environment set-up, the command line, clusters. No request passes through here."""
