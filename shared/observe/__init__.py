"""Log lines and metrics. Each app makes the objects and passes them on, so that none is global."""
