"""Copies pages out of a pool into one block, and digests them on the way: each byte is read once.

The digest is that of shared/transfer/digest.py, with the same bits. It is a sum that wraps: programs add to it in any
order. A byte counts as its word would: byte b of word i is worth 256 ** b of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launcher import launch, recorded
from shared.gpu_kernel.signatures import REAL_MODELS, Signature

WORD = 8
BLOCK = 2048  # items of a program
GOLDEN = tl.constexpr(0x1E3779B97F4A7C15)


@triton.jit(do_not_specialize=["first", "page_items", "num_items"])
def gather_pages_kernel(
    pool,  # (num_pages, page_items): bytes, or words of 8
    pages,  # (n,) int64
    block,  # (n, num_items), or None: only the digests are wanted
    digests,  # (n,) int64, zeroed
    first,  # item of a page where the copied part begins
    page_items,
    num_items,  # of that part
    ITEM_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do BLOCK items of one page."""
    row = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = item < num_items
    held = tl.load(pool + tl.load(pages + row) * page_items + first + item, mask=inside, other=0)
    if block is not None:
        tl.store(block + row * num_items + item, held, mask=inside)
    place = item.to(tl.int64) * ITEM_BYTES
    weights = ((place // 8 + 1) * GOLDEN | 1) << (place % 8 * 8)
    tl.atomic_add(digests + row, tl.sum(held.to(tl.int64) * weights, axis=0))


def gather_pages(pool: torch.Tensor, pages: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the bytes `part` of these pages. pool: (num_pages, page_bytes) uint8, contiguous; pages: (n,) int64 on its
    device. Return them, (n, bytes) uint8, and their digests, (n,) int64."""
    block = torch.empty(len(pages), part.stop - part.start, dtype=torch.uint8, device=pool.device)
    return block, launch_gather(pool, pages, part, block)


def digest_pages(pool: torch.Tensor, pages: torch.Tensor, part: slice) -> torch.Tensor:
    """As gather_pages, without the copy: (n,) int64."""
    return launch_gather(pool, pages, part, None)


def launch_gather(pool: torch.Tensor, pages: torch.Tensor, part: slice, block: torch.Tensor | None) -> torch.Tensor:
    """In words where all places are multiples of 8 bytes, else byte by byte."""
    size, page_bytes = part.stop - part.start, pool.shape[1]
    item = 1 if (part.start | size | page_bytes | pool.data_ptr()) % WORD else WORD
    dtype = torch.uint8 if item == 1 else torch.int64
    flat, out = pool.view(-1).view(dtype), None if block is None else block.view(-1).view(dtype)
    digests = torch.zeros(len(pages), dtype=torch.int64, device=pool.device)
    grid = (len(pages), triton.cdiv(size // item, BLOCK))
    numbers = (part.start // item, page_bytes // item, size // item)
    launch(gather_pages_kernel, grid, flat, pages, out, digests, *numbers, ITEM_BYTES=item, BLOCK=BLOCK)
    return digests


def real_signatures() -> set[Signature]:
    """Return those of a hand-off: a page of 16 tokens of a layer, whole, and an odd part."""
    with recorded() as signatures:
        for model in REAL_MODELS:
            page_bytes = 2 * 16 * model.num_kv_heads * model.head_dim * 2
            pool = torch.empty(64, page_bytes, dtype=torch.uint8, device="meta")
            pages = torch.empty(8, dtype=torch.int64, device="meta")
            for part in (slice(0, page_bytes), slice(3, page_bytes - 2)):
                gather_pages(pool, pages, part)
                digest_pages(pool, pages, part)
    return signatures
