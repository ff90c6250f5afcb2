"""Kernels in Triton. Import this package only where Triton is installed."""
