"""HashLM, a model whose integers make every answer exact: its ranks, stages, encoder, draft head and reference."""
