"""Configuration: frozen dataclasses with flags and files. Only this package uses environment variables."""
