"""Anthropic's Messages: requests, history and answers."""
