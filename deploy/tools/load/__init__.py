"""`baton load`: load any OpenAI-compatible server, measure its users' latencies, and check its answers."""
