"""HashLM: a model over integers whose streams are exact; its ranks, stages, encoder and draft head, its reference."""
