"""Baton: what routers and nodes have in common."""
