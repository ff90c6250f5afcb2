"""What every network shares: its interface, shape, weights and kernels."""
