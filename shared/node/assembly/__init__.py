"""From settings to a core and a node: device, model, memory and graphs."""
