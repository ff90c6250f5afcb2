"""`baton verify` and `baton replay`: check certificates of answers, and compute such answers again."""
