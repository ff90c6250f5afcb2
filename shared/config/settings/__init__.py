"""Classes of settings, one per concern, and the checks of their values."""
