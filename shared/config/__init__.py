"""Configuration: frozen dataclasses, flags and files made from them. The only package that touches the environment."""
