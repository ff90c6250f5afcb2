"""Kernels in Triton for a GPU's node. Import only where Triton is there: nothing else may import this package."""
