"""T5, which has an encoder."""
