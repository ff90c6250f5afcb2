"""The tools and schemas that clients declare."""
