"""Kernels in Triton, for nodes on a GPU. Import this package only where Triton is installed."""
