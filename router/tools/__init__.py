"""Tool calls and reasoning: declared tools, grammars, and readers of growing answers."""
