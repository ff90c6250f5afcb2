"""Fetch models named org/name once from a Hugging Face hub, before any daemon starts."""
