"""Configuration: frozen dataclasses with flags and files. No other package uses environment variables."""
