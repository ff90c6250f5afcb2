"""The sampler and look-ups of drafts on a CPU, and their noise."""
