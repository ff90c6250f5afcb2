"""Models named as org/name: fetched from a Hugging Face hub into its cache, once, before anything starts."""
