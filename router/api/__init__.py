"""The HTTP side of the router: OpenAI's request and answer shapes, limits, errors and streaming."""
