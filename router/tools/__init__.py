"""Tool calls and reasoning: declared tools, grammars of calls, and readers of growing answers."""
