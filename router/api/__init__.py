"""The router's HTTP API, in OpenAI's and Anthropic's forms."""
