"""Tool calls and reasoning: what requests declare, the grammar of calls, and answers read as they grow. No sockets."""
