"""How calls are written in a text: shapes, readers and grammars of all formats."""
