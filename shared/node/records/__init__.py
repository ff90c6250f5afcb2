"""What a node's rounds read and write: the core's interface, actions, leases, tombstones, spans."""
