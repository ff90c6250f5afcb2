"""What stands at each path: handlers and routes, the pages that list them, and the run of one answer."""
