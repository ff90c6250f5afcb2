"""Grammars of structured answers: llguidance compiles them for one vocabulary, and follows them token by token."""
