"""`baton generate`: answer a file of requests in OpenAI's batch format, offline."""
