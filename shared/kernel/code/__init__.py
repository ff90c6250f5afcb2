"""How kernels are compiled, kept and checked, and what they all use."""
