"""The Llama family's network, its adapters and its draft head."""
