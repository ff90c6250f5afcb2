"""The load to send: sessions, lengths and times."""
