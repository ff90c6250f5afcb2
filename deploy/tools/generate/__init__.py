"""`baton generate`: a file of requests in OpenAI's batch form, answered offline, line by line."""
