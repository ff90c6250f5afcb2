"""OpenAI's endpoints: completions, chats and responses, and the tokens of a text."""
