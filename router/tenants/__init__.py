"""Tenants of the API: who they are, by their keys."""
