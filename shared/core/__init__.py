"""The engine's basic types: keys, requests, parameters, errors."""
