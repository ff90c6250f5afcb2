"""Which rows, prompts and grants the next step gets."""
