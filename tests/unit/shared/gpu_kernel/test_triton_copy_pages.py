"""Pages copied and digested by one kernel, interpreted, against the transports' own digest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shared.kernel.product import libraries
from shared.transfer.digest import copy_and_digest, sums_by_torch, tensor_digests

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
copies = interpreter.kernels("copy_pages")

LARGE = 3 * 8 * copies.BLOCK
POISON = 0x5B
PARTS = [
    (64, slice(0, 64), 0),
    (64, slice(8, 48), 0),
    (64, slice(3, 62), 0),
    (64, slice(8, 47), 0),
    (61, slice(0, 61), 0),
    (64, slice(0, 64), 1),
    (LARGE, slice(0, LARGE), 0),
    (LARGE, slice(16, LARGE - 8), 0),
    (LARGE // 8 + 5, slice(1, LARGE // 8), 0),
]


def make_pool(num_pages: int, page_bytes: int, offset: int = 0) -> torch.Tensor:
    torch.manual_seed(page_bytes)
    held = torch.randint(0, 256, (num_pages * page_bytes + offset,), dtype=torch.uint8)
    return held[offset:].view(num_pages, page_bytes)


def words(sums: torch.Tensor) -> list[int]:
    return [number % 2**64 for number in sums.tolist()]


@pytest.mark.parametrize(("page_bytes", "part", "offset"), PARTS)
@pytest.mark.parametrize("more", [0, 24, 5], ids=["same pages", "larger pages", "odd pages"])
def test_pages_and_digests(page_bytes: int, part: slice, offset: int, more: int) -> None:
    """The target's pages may be larger: they have a draft head's planes behind. Programs run in two drawn orders."""
    pool, target = make_pool(5, page_bytes, offset), torch.full((6, page_bytes + more), POISON, dtype=torch.uint8)
    pages, places = torch.tensor([4, 1, 4, 0]), torch.tensor([5, 2, 1, 3])
    want = words(sums_by_torch(pool, pages.tolist(), part))
    for seed in (1, 2):
        got = target.clone()
        with interpreter.shuffled(seed):
            digests = copies.copy_pages(pool, pages, got, places, part)
        expected = target.clone()
        expected[places, part] = pool[pages, part]
        assert torch.equal(got, expected) and words(digests) == want
        assert torch.equal(copies.digest_pages(pool, pages, part), digests)


def test_a_changed_byte_and_exchanged_words_show() -> None:
    pool = make_pool(2, 64)
    pages, part = torch.tensor([0, 1]), slice(0, 64)
    before = copies.digest_pages(pool, pages, part).tolist()
    pool[0, 63] ^= 128
    words = pool[1].view(torch.int64)
    words[2], words[5] = words[5].item(), words[2].item()
    after = copies.digest_pages(pool, pages, part).tolist()
    assert before[0] != after[0] and before[1] != after[1]


def test_a_pool_of_more_items_than_an_int32_counts() -> None:
    """Mapped, never touched but for its last page."""
    page_bytes, num_pages = 1 << 20, 2100
    pool, target = (torch.empty(num_pages, page_bytes, dtype=torch.uint8) for _ in range(2))
    pool[-1], target[-2] = 7, POISON
    pages, places, part = torch.tensor([num_pages - 1]), torch.tensor([num_pages - 2]), slice(3, 100)
    digests = copies.copy_pages(pool, pages, target, places, part)
    assert torch.equal(target[-2, part], pool[-1, part]) and pool.numel() > 2**31
    assert target[-2, 2] == target[-2, 100] == POISON
    assert words(digests) == words(sums_by_torch(pool, pages.tolist(), part))


@pytest.mark.parametrize("on_kernels", [False, True])
def test_transports_copy_and_digest_by_the_kernel_where_it_runs(
    on_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And by torch's operators elsewhere: the same digests, or a peer of the other kind refuses every page."""
    launched: list[str] = []
    for name in ("copy_pages", "digest_pages"):
        run = getattr(copies, name)
        monkeypatch.setattr(copies, name, lambda *given, name=name, run=run: launched.append(name) or run(*given))
    monkeypatch.setattr(libraries, "runs_triton", lambda device: on_kernels)
    pool, target, part = make_pool(5, 61), make_pool(5, 64), slice(2, 60)
    own = SimpleNamespace(pages_bytes=target)
    found = copy_and_digest(pool, [3, 1], target, [2, 4], part)
    assert torch.equal(target[[2, 4], part], pool[[3, 1], part])
    assert found == tensor_digests(own, [2, 4], part) == words(sums_by_torch(pool, [3, 1], part))
    assert tensor_digests(own, [], part) == []
    assert launched == (["copy_pages", "digest_pages"] if on_kernels else [])
