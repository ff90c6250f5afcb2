"""Fetch models named org/name once from a Hugging Face hub into its cache, before any daemon starts."""
