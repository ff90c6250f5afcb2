"""The fields of bodies: their tables, and how values are read."""
