"""KVPool: planes and pages are the same bytes; a peer sees them read-only and only after everything checks out."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import stat
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from shared.core.errors import ConfigError, HandoffFailed
from shared.kv.layout import PlaneSpec
from shared.kv.pages import PageAllocator
from shared.kv.pool import KVPool, ReadOnlyPool

NUM_PAGES = 6
PLANES = (PlaneSpec("kv", (2, 2, 3, 4, 8), torch.bfloat16), PlaneSpec("draft", (5, 3), torch.int64))
PAGE_BYTES = 768 + 128  # 15 x 8 bytes, padded to 64
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="memfd")


@pytest.fixture
def shared_pool() -> Iterator[KVPool]:
    pool = KVPool(PLANES, NUM_PAGES, 4, shared=True)
    yield pool
    pool.close()


def open_peer(pool: KVPool, **changes: int) -> ReadOnlyPool:
    args = {
        "pid": os.getpid(),
        "fd": pool.fd,
        "num_pages": pool.num_pages,
        "page_bytes": pool.page_bytes,
        "nonce": pool.nonce,
    }
    return ReadOnlyPool.open(**(args | changes))


def num_open_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_unknown_names_and_pages_are_refused() -> None:
    pool = KVPool(PLANES, NUM_PAGES, 4)
    with pytest.raises(KeyError, match="no plane 'k'"):
        pool.plane("k")
    for page in (-1, NUM_PAGES):
        with pytest.raises(IndexError):
            pool.page_view(page)
    with pytest.raises(ConfigError, match="not shared"):
        _ = pool.fd


@linux_only
def test_a_peer_sees_pages_and_generations(shared_pool: KVPool) -> None:
    allocator = PageAllocator(NUM_PAGES, shared_pool.generation)
    peer = open_peer(shared_pool)
    pages = allocator.alloc(2)
    shared_pool.plane("draft")[2] = 9
    assert pages is not None and peer.generation.tolist() == [0, 1, 1, 0, 0, 0]
    assert np.array_equal(peer.page(2), shared_pool.page_view(2)) and peer.page(2).any()
    allocator.free(pages[:1])
    assert peer.generation.tolist() == [0, 2, 1, 0, 0, 0]


@linux_only
def test_a_peer_cannot_write(shared_pool: KVPool) -> None:
    peer = open_peer(shared_pool)
    for view in (peer.page(1), peer.generation):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


@linux_only
def test_nobody_can_map_it_for_writing_or_shrink_it(shared_pool: KVPool) -> None:
    """It has no name, and others than its owner can't open it at all."""
    info = os.fstat(shared_pool.fd)
    assert stat.S_IMODE(info.st_mode) == 0o600 and info.st_nlink == 0 and not os.get_inheritable(shared_pool.fd)
    fd = os.open(f"/proc/self/fd/{shared_pool.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


@linux_only
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nonce": 1}, "another pool"),
        ({"num_pages": NUM_PAGES * 2, "page_bytes": PAGE_BYTES // 2}, "another pool"),
        ({"num_pages": NUM_PAGES + 1}, "bytes instead of"),
        ({"num_pages": NUM_PAGES - 1}, "bytes instead of"),
        ({"num_pages": 1 << 60}, "bytes instead of"),
        ({"num_pages": 1}, "make no sense"),
        ({"page_bytes": 0}, "make no sense"),
        ({"pid": 0}, "make no sense"),
        ({"fd": -1}, "make no sense"),
        ({"pid": 1 << 22}, "can't be mapped"),
        ({"pid": 1, "fd": 1 << 20}, "can't be mapped"),
    ],
)
def test_a_wrong_reference_is_a_typed_error(shared_pool: KVPool, changes: dict[str, int], named: str) -> None:
    """Process 1 may be a peer: the first of its container."""
    with pytest.raises(HandoffFailed, match=named):
        open_peer(shared_pool, **changes)


@linux_only
def test_what_is_no_memory_file_is_not_even_opened(shared_pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a device or a pipe has effects."""
    opened: list[str] = []
    plain = os.open

    def watch(path: str, flags: int) -> int:
        opened.append(path)
        return plain(path, flags)

    monkeypatch.setattr(os, "open", watch)
    read_end, write_end = os.pipe()
    with pytest.raises(HandoffFailed, match="not a memory file"):
        open_peer(shared_pool, fd=read_end)
    os.close(read_end), os.close(write_end)
    assert not opened
    open_peer(shared_pool).close()
    assert opened == [f"/proc/{os.getpid()}/fd/{shared_pool.fd}"]


@linux_only
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("num_pages", [508, 509])
def test_pages_begin_on_a_system_page_and_the_sink_has_bytes_too(num_pages: int, shared: bool) -> None:
    """Numbers and generations of 508 pages fill 4 KiB exactly; one more needs another 4."""
    pool = KVPool(PLANES, num_pages, 4, shared=shared)
    assert pool.pages_bytes.data_ptr() % 4096 == 0
    assert pool.pages_bytes.data_ptr() - pool.generation.ctypes.data == (4096 if num_pages < 509 else 8192) - 32
    pool.page_view(0)[:] = 7
    assert (pool.pages_bytes[0] == 7).all() and not pool.pages_bytes[1:].any()
    pool.close()


@linux_only
def test_a_file_that_could_be_truncated_is_refused(shared_pool: KVPool) -> None:
    unsealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, os.fstat(shared_pool.fd).st_size)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)  # not against shrinking
    with pytest.raises(HandoffFailed, match="truncated"):
        open_peer(shared_pool, fd=unsealed)
    os.close(unsealed)


@linux_only
def test_a_file_of_another_user_is_refused(shared_pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(HandoffFailed, match="belongs to uid"):
        open_peer(shared_pool)


@linux_only
def test_page_numbers_of_a_peer_are_checked(shared_pool: KVPool) -> None:
    peer = open_peer(shared_pool)
    for page in (-1, 0, NUM_PAGES):
        with pytest.raises(HandoffFailed, match="out of range"):
            peer.page(page)


@linux_only
def test_close_releases_everything() -> None:
    before = num_open_fds()
    pool = KVPool(PLANES, NUM_PAGES, 4, shared=True)
    peer = open_peer(pool)
    pool.page_view(3)[0] = 5
    pool.close()
    assert peer.page(3)[0] == 5, "a peer's view outlives the owner"
    peer.close()
    assert num_open_fds() == before
    assert peer.generation.tolist() == [] and peer._pages.shape == (0, pool.page_bytes)


def test_a_pool_on_a_device_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match="can't be shared"):
        KVPool(PLANES, NUM_PAGES, 4, device="cuda", shared=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pool_on_cuda_is_the_same_without_host_views() -> None:
    pool = KVPool(PLANES, NUM_PAGES, 4, device="cuda")
    pool.plane("draft")[2] = 7
    assert int(pool.pages_bytes[2].sum()) == 7 * 15
    assert pool.generation.shape == (NUM_PAGES,)
    with pytest.raises(ConfigError, match="no host view"):
        pool.page_view(1)
