"""One step on the device: the frozen plan, the relay between steps, the worker that runs it, the lease that ends it."""
