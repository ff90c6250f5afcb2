"""/admin: what operators may do to nodes and adapters."""
