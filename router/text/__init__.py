"""Text in and out of token ids. Only the router has text; nodes see ids. Never loads torch."""
