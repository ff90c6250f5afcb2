"""The engine: all code that prefill and decode nodes share. Each package imports only from packages below it."""
