"""From tokens to bytes: a choice's text, its blocks and events, and the plan that they follow."""
