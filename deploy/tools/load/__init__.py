"""`baton load`: load any OpenAI-compatible server, measure latencies, and check answers."""
