"""Run one step on the device: frozen plan, relay between steps, worker and lease."""
