"""Certificates of answers: what they say, how they are signed and checked, and the keys that sign them."""
