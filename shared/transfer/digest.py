"""What a page's bytes are recognised by after a copy: xxh3_64 in host memory, a weighted sum on a GPU.

The sum is over the 64-bit words, each times an odd number of its place, and wraps: a word that changes always shows,
two that are exchanged do too. Both find what went wrong, not who meant it to. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import xxhash

from shared.kv.pool import ByteArray, KVPool

WORD = 8
GOLDEN = 0x1E3779B97F4A7C15  # fits int64
Digests = Callable[[KVPool, list[int], slice], list[int]]


def page_digest(page: ByteArray) -> int:
    """xxh3_64 of (page_bytes,) uint8; contiguous, any place. Without the GIL."""
    return xxhash.xxh3_64_intdigest(page.data)


def host_digests(pool: KVPool, pages: list[int], where: slice) -> list[int]:
    return [page_digest(pool.page_view(page)[where]) for page in pages]


def tensor_digests(pool: KVPool, pages: list[int], where: slice) -> list[int]:
    """Of pages on any device; runs on its current stream and waits for it."""
    taken = torch.stack([pool.pages_bytes[page, where] for page in pages]) if pages else torch.empty(0, 0)
    if taken.shape[-1] % WORD:
        taken = torch.nn.functional.pad(taken, (0, WORD - taken.shape[-1] % WORD))
    words = taken.view(torch.int64) if pages else taken.long()
    weights = torch.arange(1, words.shape[-1] + 1, device=words.device) * GOLDEN | 1
    return [int(word) for word in (words * weights).sum(-1).cpu().numpy().view(np.uint64)]
