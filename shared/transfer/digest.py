"""Compute digests that check a page's bytes after a copy: xxh3_64 in host memory, a weighted sum on a GPU.

The sum multiplies each 64-bit word by an odd number that depends on the word's place, and wraps around. It detects
changed and exchanged words. Digests detect accidents, not attacks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import xxhash

from shared.kernel.product import libraries
from shared.kv.pool import ByteArray, KVPool

WORD = 8
GOLDEN = 0x1E3779B97F4A7C15  # fits int64
Digests = Callable[[KVPool, list[int], slice], list[int]]


def page_digest(page: ByteArray) -> int:
    """Return xxh3_64 of a contiguous (page_bytes,) uint8 page. Releases the GIL."""
    return xxhash.xxh3_64_intdigest(page.data)


def host_digests(pool: KVPool, pages: list[int], where: slice) -> list[int]:
    return [page_digest(pool.page_view(page)[where]) for page in pages]


def tensor_digests(pool: KVPool, pages: list[int], where: slice) -> list[int]:
    """Return digests of pages on any device. On CUDA, launch once on the current stream, and wait."""
    held = pool.pages_bytes
    if not pages:
        return []
    if libraries.runs_triton(held.device):
        from shared.gpu_kernel.copy_pages import digest_pages

        return read_sums(digest_pages(held, torch.tensor(pages, device=held.device), where))
    return read_sums(sums_by_torch(held, pages, where))


def copy_and_digest(
    source: torch.Tensor, pages: list[int], target: torch.Tensor, own: list[int], where: slice
) -> list[int]:
    """Copy pages between pools, (num_pages, page_bytes) uint8, on the current stream; return the copies' digests.

    The host waits. Within one device, a single kernel reads each byte once. A pool on another device must have been
    opened by torch.
    """
    if libraries.runs_triton(target.device) and source.device == target.device:
        from shared.gpu_kernel.copy_pages import copy_pages

        numbers, own_numbers = (torch.tensor(given, device=target.device) for given in (pages, own))
        return read_sums(copy_pages(source, numbers, target, own_numbers, where))
    for src, dst in zip(pages, own, strict=True):
        target[dst, where].copy_(source[src, where])
    return read_sums(sums_by_torch(target, own, where))


def read_sums(sums: torch.Tensor) -> list[int]:
    """Convert sums, (n,) int64, to unsigned ints. The host waits."""
    return [int(word) for word in sums.cpu().numpy().view(np.uint64)]


def sums_by_torch(held: torch.Tensor, pages: list[int], where: slice) -> torch.Tensor:
    """Return each page's sum as (n,) int64, on any device. `held`: (num_pages, page_bytes) uint8."""
    taken = torch.stack([held[page, where] for page in pages])
    if taken.shape[-1] % WORD:
        taken = torch.nn.functional.pad(taken, (0, WORD - taken.shape[-1] % WORD))
    words = taken.view(torch.int64)
    weights = torch.arange(1, words.shape[-1] + 1, device=words.device) * GOLDEN | 1
    return (words * weights).sum(-1)
