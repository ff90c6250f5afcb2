"""Where a request goes: placement, sources of its prefix, and policies that pick one of the suitable nodes."""
