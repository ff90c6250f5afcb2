"""Requests by state, from their intake to their results."""
