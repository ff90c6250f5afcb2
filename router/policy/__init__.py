"""How a node is picked among those that fit: one file each."""
