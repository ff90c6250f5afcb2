"""Pages copied and digested by one kernel, interpreted, against the transports' own digest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shared.transfer.digest import tensor_digests

interpreter = pytest.importorskip("tests.support.interpreter", exc_type=ImportError)
gather_pages = interpreter.kernels("gather_pages")

LARGE = 3 * 8 * gather_pages.BLOCK


def make_pool(num_pages: int, page_bytes: int, offset: int = 0) -> torch.Tensor:
    torch.manual_seed(page_bytes)
    held = torch.randint(0, 256, (num_pages * page_bytes + offset,), dtype=torch.uint8)
    return held[offset:].view(num_pages, page_bytes)


@pytest.mark.parametrize(
    ("page_bytes", "part", "offset"),
    [
        (64, slice(0, 64), 0),
        (64, slice(8, 48), 0),
        (64, slice(3, 62), 0),
        (64, slice(8, 47), 0),
        (61, slice(0, 61), 0),
        (64, slice(0, 64), 1),
        (LARGE, slice(0, LARGE), 0),
        (LARGE, slice(16, LARGE - 8), 0),
        (LARGE // 8 + 5, slice(1, LARGE // 8), 0),
    ],
)
def test_pages_and_digests(page_bytes: int, part: slice, offset: int) -> None:
    pool = make_pool(5, page_bytes, offset)
    pages = torch.tensor([4, 1, 4, 0])
    want = tensor_digests(SimpleNamespace(pages_bytes=pool), pages.tolist(), part)
    for seed in (1, 2):
        with interpreter.shuffled(seed):
            block, digests = gather_pages.gather_pages(pool, pages, part)
        assert torch.equal(block, pool[pages, part])
        assert [digest % 2**64 for digest in digests.tolist()] == want
        assert torch.equal(gather_pages.digest_pages(pool, pages, part), digests)


def test_a_changed_byte_and_exchanged_words_show() -> None:
    pool = make_pool(2, 64)
    pages, part = torch.tensor([0, 1]), slice(0, 64)
    before = gather_pages.digest_pages(pool, pages, part).tolist()
    pool[0, 63] ^= 128
    words = pool[1].view(torch.int64)
    words[2], words[5] = words[5].item(), words[2].item()
    after = gather_pages.digest_pages(pool, pages, part).tolist()
    assert before[0] != after[0] and before[1] != after[1]


def test_no_pages() -> None:
    block, digests = gather_pages.gather_pages(make_pool(2, 64), torch.empty(0, dtype=torch.int64), slice(0, 64))
    assert block.shape == (0, 64) and digests.shape == (0,)


def test_a_pool_of_more_items_than_an_int32_counts() -> None:
    """Mapped, never touched but for its last page."""
    page_bytes, num_pages = 1 << 20, 2100
    pool = torch.empty(num_pages, page_bytes, dtype=torch.uint8)
    pool[-1] = 7
    pages, part = torch.tensor([num_pages - 1]), slice(3, 100)
    block, digests = gather_pages.gather_pages(pool, pages, part)
    assert torch.equal(block, pool[-1:, part]) and pool.numel() > 2**31
    assert [digests.item() % 2**64] == tensor_digests(SimpleNamespace(pages_bytes=pool), [num_pages - 1], part)
