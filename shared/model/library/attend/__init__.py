"""Attention of the library's layers over Baton's pages.

layer_places  planes of pages by the layers' sizes, page groups by windows
layer_pages   writes and reads a layer's tokens
step_rows     rows that attend together
latents, indexer  what MLA layers, and layers with an indexer, keep instead or beside
attention     the function that the library's layers call, in plain torch
compiled_attention  with our kernels on a CPU
device_attention    on a GPU, where the host knows only bounds of lengths; kernel_attention: our kernels there
rank_attention      a rank's own heads of the pages
"""
