"""KVPool: planes and pages are the same bytes; a peer sees them read-only and only after everything checks out."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.core.errors import ConfigError, HandoffFailed
from shared.kv.layout import PlaneSpec
from shared.kv.pages import PageAllocator
from shared.kv.pool import KVPool, ReadOnlyPool
from tests.support.machine.patience import HANG_GUARD_S

NUM_PAGES = 6
PLANES = (PlaneSpec("kv", (2, 2, 3, 4, 8), torch.bfloat16), PlaneSpec("draft", (5, 3), torch.int64))
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


def test_planes_are_views_of_whole_pages() -> None:
    pool = KVPool(PLANES, NUM_PAGES, 4)
    kv, draft = pool.plane("kv"), pool.plane("draft")
    assert kv.shape == (NUM_PAGES, 2, 2, 3, 4, 8) and kv.dtype == torch.bfloat16
    assert draft.shape == (NUM_PAGES, 5, 3) and draft.dtype == torch.int64
    assert pool.page_bytes == 768 + 128  # 15 x 8 bytes, padded to 64
    values = torch.arange(15).reshape(5, 3)
    draft[2] = values
    kv[2] = 1.5
    page = pool.page_view(2)
    assert page.shape == (pool.page_bytes,)
    assert page[768 : 768 + 120].view(np.int64).tolist() == values.flatten().tolist()
    assert set(page[:768].view(np.uint16).tolist()) == {0x3FC0}
    assert not pool.page_view(1).any() and not pool.page_view(3).any()


def test_a_plane_can_be_written_in_and_outside_inference_mode() -> None:
    pool = KVPool(PLANES, NUM_PAGES, 4)
    with torch.inference_mode():
        pool.plane("kv")[1] = 1.0
    pool.plane("kv")[1] = 2.0
    assert (pool.plane("kv")[1] == 2.0).all()


def test_a_page_copied_as_bytes_is_the_same_page() -> None:
    pool = KVPool(PLANES, NUM_PAGES, 4)
    pool.plane("kv")[1] = torch.randn(2, 2, 3, 4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    pool.page_view(5)[:] = pool.page_view(1)
    assert torch.equal(pool.plane("kv")[5], pool.plane("kv")[1])
    pool.pages_bytes[5] = 0
    assert not pool.plane("kv")[5].any()


def test_unknown_names_and_pages_are_refused() -> None:
    pool = KVPool(PLANES, NUM_PAGES, 4)
    with pytest.raises(KeyError, match="no plane 'k'"):
        pool.plane("k")
    for page in (-1, NUM_PAGES):
        with pytest.raises(IndexError):
            pool.page_view(page)
    with pytest.raises(ConfigError, match="not shared"):
        _ = pool.fd


def test_views_outlive_close() -> None:
    pool = KVPool(PLANES, NUM_PAGES, 4)
    draft = pool.plane("draft")
    draft[1] = 7
    pool.close()
    pool.close()
    assert int(draft[1].sum()) == 7 * 15


def test_allocating_touches_nothing() -> None:
    """4 GiB of address space, of which one page is written."""
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = KVPool((PlaneSpec("kv", (1 << 18,), torch.float32),), 1 << 12, 16)
    pool.plane("kv")[77] = 1.0
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 1 << 16
    pool.close()


@linux_only
def test_a_peer_sees_pages_and_generations(shared_pool: KVPool) -> None:
    allocator = PageAllocator(NUM_PAGES, shared_pool.generation)
    peer = open_peer(shared_pool)
    pages = allocator.alloc(2)
    shared_pool.plane("draft")[2] = 9
    assert pages is not None and peer.generation.tolist() == [0, 1, 1, 0, 0, 0]
    assert np.array_equal(peer.page(2), shared_pool.page_view(2)) and peer.page(2).any()
    allocator.free(pages)
    assert peer.generation.tolist() == [0, 2, 2, 0, 0, 0]


@linux_only
def test_a_peer_cannot_write(shared_pool: KVPool) -> None:
    peer = open_peer(shared_pool)
    for view in (peer.page(1), peer.generation):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


@linux_only
def test_nobody_can_map_it_for_writing_or_shrink_it(shared_pool: KVPool) -> None:
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
def test_the_memory_file_has_mode_0600_and_no_name(shared_pool: KVPool) -> None:
    info = os.fstat(shared_pool.fd)
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_nlink == 0
    assert not os.get_inheritable(shared_pool.fd)


@linux_only
@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": 1},
        {"num_pages": NUM_PAGES + 1},
        {"num_pages": 0},
        {"num_pages": 1 << 60},
        {"page_bytes": 64},
        {"page_bytes": 0},
        {"fd": 1 << 20},
        {"fd": -1},
        {"pid": 1 << 22},
        {"pid": 0},
    ],
)
def test_a_wrong_reference_is_a_typed_error(shared_pool: KVPool, changes: dict[str, int]) -> None:
    with pytest.raises(HandoffFailed):
        open_peer(shared_pool, **changes)


@linux_only
@pytest.mark.parametrize("changes", [{"pid": 0}, {"fd": -1}, {"num_pages": 1}, {"page_bytes": 0}])
def test_a_senseless_number_is_named_before_anything_is_read(shared_pool: KVPool, changes: dict[str, int]) -> None:
    with pytest.raises(HandoffFailed, match="make no sense"):
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


def has_view(pool: KVPool, page: int) -> bool:
    try:
        return pool.page_view(page).size == pool.page_bytes
    except IndexError:
        return False


@linux_only
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("num_pages", [2, 508, 509])
def test_pages_begin_on_a_system_page_and_the_sink_has_bytes_too(num_pages: int, shared: bool) -> None:
    """Numbers and generations of 508 pages fill 4 KiB exactly; one more needs another 4."""
    pool = KVPool(PLANES, num_pages, 4, shared=shared)
    assert pool.pages_bytes.data_ptr() % 4096 == 0
    assert pool.pages_bytes.data_ptr() - pool.generation.ctypes.data == (4096 if num_pages < 509 else 8192) - 32
    assert [page for page in range(-1, num_pages + 1) if has_view(pool, page)] == list(range(num_pages))
    pool.page_view(0)[:] = 7
    assert (pool.pages_bytes[0] == 7).all() and not pool.pages_bytes[1:].any()
    pool.close()


@linux_only
def test_a_peer_may_be_the_first_process_of_its_container(shared_pool: KVPool) -> None:
    with pytest.raises(HandoffFailed, match="can't be mapped"):
        open_peer(shared_pool, pid=1, fd=1 << 20)


@linux_only
@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_of_another_size_is_named_before_it_is_mapped(shared_pool: KVPool, more: int) -> None:
    with pytest.raises(HandoffFailed, match="bytes instead of"):
        open_peer(shared_pool, num_pages=NUM_PAGES + more)


@linux_only
def test_the_same_size_with_another_layout_is_refused(shared_pool: KVPool) -> None:
    half = {"num_pages": NUM_PAGES * 2, "page_bytes": shared_pool.page_bytes // 2}
    with pytest.raises(HandoffFailed, match="another pool"):
        open_peer(shared_pool, **half)


@linux_only
def test_a_file_that_could_be_truncated_or_is_no_file_is_refused(shared_pool: KVPool) -> None:
    unsealed = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, os.fstat(shared_pool.fd).st_size)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)  # not against shrinking
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(HandoffFailed, match="truncated"):
            open_peer(shared_pool, fd=unsealed)
        with pytest.raises(HandoffFailed, match="not a memory file"):
            open_peer(shared_pool, fd=read_end)
    finally:
        for fd in (unsealed, read_end, write_end):
            os.close(fd)


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


@linux_only
def test_another_process_opens_it(shared_pool: KVPool) -> None:
    shared_pool.page_view(4)[:3] = (1, 2, 3)
    script = "import sys; from shared.kv.pool import ReadOnlyPool as R; a = [int(x) for x in sys.argv[1:]]\n"
    script += "print(R.open(*a).page(4)[:4].tolist())"
    ref = (os.getpid(), shared_pool.fd, NUM_PAGES, shared_pool.page_bytes, shared_pool.nonce)
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, ref)],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_GUARD_S,
        cwd=Path(__file__).parents[4],
    )
    assert done.stdout.strip() == "[1, 2, 3, 0]"


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
