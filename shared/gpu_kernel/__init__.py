"""Kernels in Triton. All modules but real_models need Triton."""
