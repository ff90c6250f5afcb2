"""Keys and their files."""
