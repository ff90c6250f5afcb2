"""HTTP itself: the server, the protocol, connections, limits, web rules, errors. Knows no endpoint."""
