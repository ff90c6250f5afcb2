"""Threads that run compiled programs, and the machine's table of cores."""
