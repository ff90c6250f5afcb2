"""Who gets pages, and who returns them."""
