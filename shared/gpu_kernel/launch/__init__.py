"""How kernels are described, found and launched."""
