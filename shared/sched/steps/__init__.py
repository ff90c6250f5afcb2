"""What a step is made of: its rows, chunks and masks, and the settings."""
