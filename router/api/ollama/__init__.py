"""Ollama's endpoints: its chats, its models, and its lines of JSON."""
