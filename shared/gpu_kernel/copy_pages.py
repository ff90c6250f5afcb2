"""Copy pages between pools and compute their digests in the same pass, so that each byte is read once.

The digest equals shared/transfer/digest.py's. It is a sum that wraps around, so programs may add to it in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.real_models import REAL_MODELS
from shared.gpu_kernel.launch.signatures import Signature

WORD = 8
BLOCK = 2048  # items per program
GOLDEN = tl.constexpr(0x1E3779B97F4A7C15)


@triton.jit(do_not_specialize=["first", "source_items", "target_items", "num_items"])
def copy_pages_kernel(
    source,  # (num_pages, source_items); an item is a byte, or a word of 8 bytes
    pages,  # (n,) int64
    target,  # (num_pages, target_items), or None for digests only
    target_pages,  # (n,) int64, or None
    digests,  # (n,) int64, zeroed
    first,  # index of the part's first item in a page
    source_items,
    target_items,
    num_items,  # of the part
    ITEM_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = item < num_items
    held = tl.load(source + tl.load(pages + row) * source_items + first + item, mask=inside, other=0)
    if target is not None:
        tl.store(target + tl.load(target_pages + row) * target_items + first + item, held, mask=inside)
    place = item.to(tl.int64) * ITEM_BYTES
    weights = ((place // 8 + 1) * GOLDEN | 1) << (place % 8 * 8)
    tl.atomic_add(digests + row, tl.sum(held.to(tl.int64) * weights, axis=0))


def copy_pages(
    source: torch.Tensor, pages: torch.Tensor, target: torch.Tensor, target_pages: torch.Tensor, part: slice
) -> torch.Tensor:
    """Copy `part` of each page's bytes to the same place in its target page, on the current stream.

    Return the digests of the copied bytes, (n,) int64. source, target: (num_pages, page_bytes) uint8, contiguous,
    perhaps with different page sizes. pages, target_pages: (n,) int64 on the device of both pools."""
    return _launch(source, pages, target, target_pages, part)


def digest_pages(pool: torch.Tensor, pages: torch.Tensor, part: slice) -> torch.Tensor:
    """Return copy_pages' digests, (n,) int64, without copying."""
    return _launch(pool, pages, None, None, part)


def _launch(
    source: torch.Tensor, pages: torch.Tensor, target: torch.Tensor | None, target_pages: torch.Tensor | None,
    part: slice,
) -> torch.Tensor:  # fmt: skip
    size, pools = part.stop - part.start, [source] if target is None else [source, target]
    places = [part.start, size] + [number for pool in pools for number in (pool.shape[1], pool.data_ptr())]
    item = 1 if any(place % WORD for place in places) else WORD
    dtype = torch.uint8 if item == 1 else torch.int64
    flat = [pool.view(-1).view(dtype) for pool in pools]
    digests = torch.zeros(len(pages), dtype=torch.int64, device=source.device)
    grid = (len(pages), triton.cdiv(size // item, BLOCK))
    numbers = (part.start // item, source.shape[1] // item, pools[-1].shape[1] // item, size // item)
    out = None if target is None else flat[1]
    launch(copy_pages_kernel, grid, flat[0], pages, out, target_pages, digests, *numbers, ITEM_BYTES=item, BLOCK=BLOCK)
    return digests


def real_signatures() -> set[Signature]:
    with recorded() as signatures:
        for model in REAL_MODELS:
            page_bytes = 2 * 16 * model.num_kv_heads * model.head_dim * 2
            pool = torch.empty(64, page_bytes, dtype=torch.uint8, device="meta")
            pages = torch.empty(8, dtype=torch.int64, device="meta")
            for part in (slice(0, page_bytes), slice(3, page_bytes - 2)):
                copy_pages(pool, pages, pool, pages, part)
                digest_pages(pool, pages, part)
    return signatures
