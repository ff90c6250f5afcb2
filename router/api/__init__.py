"""The router's HTTP API: requests, answers, errors and streams in OpenAI's and Anthropic's forms."""
