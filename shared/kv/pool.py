"""Hold the memory of all KV pages, page-major, and map a peer's pool read-only.

    mapping: | magic, nonce, num_pages, page_bytes | generation u64[num_pages] | pad to 4 KiB | page 0 | page 1 | ...

A CPU's pool is one mapping, which the operating system zeroes at first touch.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import secrets
import stat
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shared.core.errors import ConfigError, HandoffFailed
from shared.kv.layout import PlaneSpec, page_bytes
from shared.kv.pages import Generations

MAGIC = 0x4241544F4E4B5631  # "BATONKV1"
HEADER_WORDS = 4
HEADER_ALIGN = 4096
F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # linux/fcntl.h
SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 0x2, 0x4, 0x10
ByteArray = npt.NDArray[np.uint8]


def header_bytes(num_pages: int) -> int:
    raw = 8 * (HEADER_WORDS + num_pages)
    return -(-raw // HEADER_ALIGN) * HEADER_ALIGN


class OtherParts(Protocol):
    """The parts of pages that the node's other ranks have on their own GPUs. A part has as many bytes as ours.

    Calls are ordered behind all steps that were launched before, and ahead of all later ones."""

    num: int

    def read(self, pages: Sequence[int], where: slice) -> list[ByteArray]:
        """Return the byte range `where` of each page of each rank, (len(pages), n) uint8. Raises RankLost."""
        ...

    def write(self, page: int, where: slice, parts: ByteArray) -> None:
        """Write the range into a page of each rank. `parts`: (num, n) uint8. Raises RankLost."""
        ...


class KVPool:
    """The memory of num_pages pages of all planes, freed with its last view. Page 0 is the sink.

    - pages_bytes: (num_pages, page_bytes) uint8 tensor on `device`
    - generation: (num_pages,) uint64 on the host, written by the PageAllocator
    - fd: with `shared`, an unnamed memory file (mode 0600) of fixed size. Once sealed, it can't be mapped writable.
    """

    def __init__(
        self,
        planes: tuple[PlaneSpec, ...],
        num_pages: int,
        page_size: int,
        device: str | torch.device = "cpu",
        shared: bool = False,
        *,
        sealed: bool = True,
        memory: mmap.mmap | None = None,
    ) -> None:
        """With sealed=False, other processes may map the pool writable until `seal` is called.

        `memory`: an unsealed pool from `map_pool`. This object then has no descriptor.
        """
        self.planes = planes
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = page_bytes(planes)
        self.device = torch.device(device)
        self.others: OtherParts | None = None  # None: this pool has whole pages
        self._views: dict[str, torch.Tensor] = {}
        self._fd: int | None = None
        on_cpu = self.device.type == "cpu"
        if shared and not on_cpu:
            raise ConfigError(f"a KV pool on {self.device} can't be shared as host memory")
        num_bytes = header_bytes(num_pages) + (num_pages * self.page_bytes if on_cpu else 0)
        is_new = memory is None
        if memory is None:
            memory = self._map_shared(num_bytes) if shared else _map_private(num_bytes)
        if shared and sealed:
            self.seal()
        words = np.frombuffer(memory, np.uint64, HEADER_WORDS + num_pages)
        if is_new:
            words[:HEADER_WORDS] = (MAGIC, secrets.randbits(63) + 1, num_pages, self.page_bytes)
        self.nonce = int(words[1])
        self.generation: Generations = words[HEADER_WORDS:]
        shape = (num_pages, self.page_bytes)
        if on_cpu:
            data = np.frombuffer(memory, np.uint8, offset=header_bytes(num_pages))
            self._host: ByteArray | None = data.reshape(shape)
            self.pages_bytes = torch.from_numpy(self._host)
        else:
            self._host = None
            self.pages_bytes = torch.zeros(shape, dtype=torch.uint8, device=self.device)

    @property
    def num_parts(self) -> int:
        """Return of how many ranks' parts a page consists."""
        return 1 if self.others is None else 1 + self.others.num

    def seal(self) -> None:
        """Forbid new writable mappings; existing ones stay."""
        with contextlib.suppress(OSError):  # fails before Linux 5.1; peers map the pool read-only anyway
            fcntl.fcntl(self.fd, F_ADD_SEALS, SEAL_FUTURE_WRITE)

    @property
    def fd(self) -> int:
        if self._fd is None:
            raise ConfigError("this KV pool is not shared")
        return self._fd

    def plane(self, name: str) -> torch.Tensor:
        """Return a writable view (num_pages, *shape) in the plane's dtype, strided over whole pages."""
        view = self._views.get(name)
        if view is None:
            with torch.inference_mode(False):  # so that all may write
                view = self._views[name] = self._view_of(name)
        return view

    def _view_of(self, name: str) -> torch.Tensor:
        offset = 0
        for plane in self.planes:
            if plane.name == name:
                return self._view(plane, offset)
            offset += plane.num_bytes
        raise KeyError(f"no plane {name!r} among {[plane.name for plane in self.planes]}")

    def _view(self, plane: PlaneSpec, offset: int) -> torch.Tensor:
        item = plane.dtype.itemsize
        flat = self.pages_bytes.view(-1).view(plane.dtype)
        inner = [math.prod(plane.shape[i + 1 :]) for i in range(len(plane.shape))]
        start = flat.storage_offset() + offset // item
        return flat.as_strided((self.num_pages, *plane.shape), (self.page_bytes // item, *inner), start)

    def move_slots(self, page_table: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """In each of D rows, copy the `source` slots of every plane to the `target` slots.

        All slots are read before any is written. page_table (D, P) int32; source and target (D, n) int64: slots,
        looked up in page_table. Runs on the caller's stream without a sync.
        """
        pages = [page_table.gather(1, slots // self.page_size).long() for slots in (source, target)]
        places = [slots % self.page_size for slots in (source, target)]
        for plane in self.planes:
            slots = self.plane(plane.name).movedim(plane.slot_dim, 1)
            slots[pages[1], places[1]] = slots[pages[0], places[0]]

    def page_view(self, page: int) -> ByteArray:
        """Return a page's writable view (page_bytes,), in host memory only."""
        if self._host is None:
            raise ConfigError(f"pages of a KV pool on {self.device} have no host view")
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} does not exist; number of pages: {self.num_pages}")
        view: ByteArray = self._host[page]
        return view

    def close(self) -> None:
        """The memory stays mapped until its last view, such as a model's planes, is freed."""
        self._host = None
        self._views.clear()
        self.pages_bytes = torch.empty((0, self.page_bytes), dtype=torch.uint8)
        self.generation = np.zeros(self.num_pages, np.uint64)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _map_shared(self, num_bytes: int) -> mmap.mmap:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("shared KV pools need Linux (memfd_create); use the zmq transport")
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, num_bytes)
            memory = mmap.mmap(fd, num_bytes)
            fcntl.fcntl(fd, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return memory


def map_pool(fd: int, num_pages: int, num_page_bytes: int) -> mmap.mmap:
    """Map this node's unsealed KVPool writable in another of its processes, and close `fd`.

    Raise OSError if the pool is sealed, and ValueError if its size differs.
    """
    try:
        return mmap.mmap(fd, header_bytes(num_pages) + num_pages * num_page_bytes)
    finally:
        os.close(fd)


def _map_private(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class ReadOnlyPool:
    """A peer's shared KVPool, mapped read-only. The mapping outlives the peer.

    generation: (num_pages,) uint64, changed by the peer. Read it before and after copying a page.
    """

    def __init__(self, memory: mmap.mmap, num_pages: int, num_page_bytes: int) -> None:
        self.num_pages = num_pages
        self.page_bytes = num_page_bytes
        self.generation: Generations = np.frombuffer(memory, np.uint64, num_pages, offset=8 * HEADER_WORDS)
        data = np.frombuffer(memory, np.uint8, offset=header_bytes(num_pages))
        self._pages: ByteArray = data.reshape(num_pages, num_page_bytes)

    @classmethod
    def open(cls, pid: int, fd: int, num_pages: int, page_bytes: int, nonce: int) -> ReadOnlyPool:
        """Map /proc/<pid>/fd/<fd>. Raise HandoffFailed unless the file is the pool with this nonce and layout."""
        subject = f"pool of pid {pid}"
        if pid < 1 or fd < 0 or num_pages < 2 or page_bytes < 1:
            raise HandoffFailed(f"{subject}: fd {fd}, {num_pages} pages of {page_bytes} bytes make no sense")
        num_bytes = header_bytes(num_pages) + num_pages * page_bytes
        try:
            memory = _map_readonly(f"/proc/{pid}/fd/{fd}", num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise HandoffFailed(f"{subject}: fd {fd} can't be mapped: {error}") from error
        header = tuple(np.frombuffer(memory, np.uint64, HEADER_WORDS).tolist())
        if header != (MAGIC, nonce, num_pages, page_bytes):
            raise HandoffFailed(f"{subject}: fd {fd} is another pool (nonce or layout differ)")
        return cls(memory, num_pages, page_bytes)

    def page(self, page: int) -> ByteArray:
        """Return a read-only view (page_bytes,). The page number is checked, because a peer sent it."""
        if not 0 < page < self.num_pages:
            raise HandoffFailed(f"page {page} is out of range 1..{self.num_pages - 1}")
        view: ByteArray = self._pages[page]
        return view

    def close(self) -> None:
        self._pages = np.zeros((0, self.page_bytes), np.uint8)
        self.generation = np.zeros(0, np.uint64)


def _map_readonly(path: str, num_bytes: int) -> mmap.mmap:
    _require_pool_file(os.stat(path), num_bytes)  # checked first, because opening a device or a pipe has effects
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_pool_file(os.fstat(fd), num_bytes)
        if not fcntl.fcntl(fd, F_GET_SEALS) & SEAL_SHRINK:
            raise ValueError("it could be truncated while it is mapped (not sealed)")
        return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _require_pool_file(info: os.stat_result, num_bytes: int) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("it is not a memory file")
    if info.st_uid != os.geteuid():
        raise ValueError(f"it belongs to uid {info.st_uid}")
    if info.st_size != num_bytes:
        raise ValueError(f"it has {info.st_size} bytes instead of {num_bytes}")
