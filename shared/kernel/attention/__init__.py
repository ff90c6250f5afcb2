"""Attention over paged KV: the interface, the reference, and compiled code."""
