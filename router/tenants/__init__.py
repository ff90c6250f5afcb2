"""Tenants of the API: their keys and limits."""
