"""Log lines and metrics. Objects are made by each process's app and passed on; nothing here is global."""
