"""Grammars of structured answers: compiled by llguidance for one vocabulary, followed token by token."""
