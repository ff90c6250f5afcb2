"""From an accepted request to its last token: who gets it, what comes back, and what begins again elsewhere."""
