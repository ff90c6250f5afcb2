"""The vocabulary of the engine: keys, requests, parameters, errors. Knows nothing of tensors, sockets or clocks."""
