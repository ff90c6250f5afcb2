"""From files to a model that can run, whole or in parts."""
