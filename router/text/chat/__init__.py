"""From a conversation to a prompt: templates, and what they need."""
