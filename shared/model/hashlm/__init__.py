"""HashLM, a model over integers whose streams are exact: its ranks, stages, encoder, draft head and reference."""
