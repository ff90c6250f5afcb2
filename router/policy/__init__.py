"""Policies that pick one of the suitable nodes, one per file."""
