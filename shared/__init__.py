"""The engine: all that prefill and decode nodes share, in rooms that import downwards only."""
