"""Keep KV pages outside the pool, under their identities: recently used pages in memory, others in a file.

    add(identity)  ->  | memory: newest ... oldest | -> demoted -> | file: newest ... oldest | -> dropped

The scheduler's thread changes the index (add, find, drop) immediately. The cold stream moves the bytes (store, load)
later, in the same order. So earlier reads of a place end before it is overwritten.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import xxhash

from shared.core.errors import ConfigError, IntegrityError
from shared.kv.pool import ByteArray


@dataclass(slots=True, eq=False)
class ColdPage:
    """A page in the tier. `place`: where its bytes are once all jobs launched so far have run.

    Places [0, num_host) are in memory, the others in the file. Only the cold stream uses `digest`.
    """

    place: int
    digest: int = 0


@dataclass(frozen=True, slots=True)
class Filing:
    """A new page's place. `demoted`: the old and new place of another page, which must move to the file first."""

    cold: ColdPage
    place: int
    demoted: tuple[int, int] | None = None


class ColdStore:
    """Holds `num_host` pages in memory, and `num_disk` pages in a file in `directory` (empty: the temporary folder)."""

    def __init__(self, page_bytes: int, num_host: int, num_disk: int = 0, directory: str = "") -> None:
        if num_host < 1:
            raise ConfigError(f"the cold tier has no room for a page of {page_bytes} bytes in memory")
        self.page_bytes = page_bytes
        self.num_host = num_host
        self.num_disk = num_disk
        self._memory = _zeros(num_host, page_bytes)
        self._file = _open_unnamed(directory, num_disk * page_bytes) if num_disk else None
        self._host: OrderedDict[bytes, ColdPage] = OrderedDict()  # least recently used first
        self._disk: OrderedDict[bytes, ColdPage] = OrderedDict()
        self._free_host = list(range(num_host - 1, -1, -1))
        self._free_disk = list(range(num_host + num_disk - 1, num_host - 1, -1))

    def __len__(self) -> int:
        return len(self._host) + len(self._disk)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._host or identity in self._disk

    # Index: the scheduler's thread

    def find(self, identity: bytes) -> ColdPage | None:
        """Find a page, and mark it as used. The caller must immediately launch the job that uses its `place`."""
        for pages in (self._host, self._disk):
            if identity in pages:
                pages.move_to_end(identity)
                return pages[identity]
        return None

    def add_page(self, identity: bytes) -> Filing:
        """Make room for a page. The caller must immediately launch the job that calls `store`."""
        if identity in self:
            raise IntegrityError(f"page {identity.hex()} is in the cold tier already")
        demoted = None if self._free_host else self._demote()
        place = self._free_host.pop()
        cold = self._host[identity] = ColdPage(place)
        return Filing(cold, place, demoted)

    def _demote(self) -> tuple[int, int] | None:
        """Return the least recently used page's old and new place, or None without a file."""
        identity, oldest = self._host.popitem(last=False)
        source = oldest.place
        self._free_host.append(source)
        if self._file is None:
            return None
        if not self._free_disk:
            self._free_disk.append(self._disk.popitem(last=False)[1].place)
        oldest.place = self._free_disk.pop()
        self._disk[identity] = oldest
        return source, oldest.place

    def drop(self, identity: bytes, cold: ColdPage) -> None:
        """Remove a damaged page, unless a newer page has its identity."""
        for pages, free in ((self._host, self._free_host), (self._disk, self._free_disk)):
            if pages.get(identity) is cold:
                del pages[identity]
                free.append(cold.place)

    # Bytes: the cold stream

    def store(self, filing: Filing, page: ByteArray) -> None:
        """Copy `page` (page_bytes,) uint8 to memory, and keep the copy's digest.

        If the file can't be written, the demoted page is lost: its next `load` raises IntegrityError.
        """
        if filing.demoted is not None:
            source, target = filing.demoted
            with contextlib.suppress(OSError):
                self._write(target, self._memory[source])
        kept = self._memory[filing.place]
        np.copyto(kept, page)
        filing.cold.digest = xxhash.xxh3_64_intdigest(kept.data)

    def load(self, cold: ColdPage, place: int, page: ByteArray) -> None:
        """Raise IntegrityError if the page's digest differs."""
        if place < self.num_host:
            np.copyto(page, self._memory[place])
        else:
            self._read(place, page)
        if xxhash.xxh3_64_intdigest(page.data) != cold.digest:
            raise IntegrityError("a page of the cold tier is not what was stored there")

    def _write(self, place: int, page: ByteArray) -> None:
        if self._file is None or os.pwrite(self._file, page.data, self._offset(place)) != self.page_bytes:
            raise OSError("short write")

    def _read(self, place: int, page: ByteArray) -> None:
        if self._file is None or os.preadv(self._file, [page.data], self._offset(place)) != self.page_bytes:
            raise IntegrityError("the file of the cold tier is shorter than what was stored there")

    def _offset(self, place: int) -> int:
        return (place - self.num_host) * self.page_bytes

    def close(self) -> None:
        """Call this after the cold stream has stopped."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def problems(self) -> list[str]:
        found = []
        kinds = (
            ("memory", self._host, self._free_host, 0, self.num_host),
            ("the file", self._disk, self._free_disk, self.num_host, self.num_host + self.num_disk),
        )
        for name, pages, free, first, end in kinds:
            if sorted([*(cold.place for cold in pages.values()), *free]) != list(range(first, end)):
                found.append(f"{name}: the places of {len(pages)} pages and {len(free)} free ones do not add up")
        twice = self._host.keys() & self._disk.keys()
        return found + [f"page {identity.hex()} is in memory and in the file" for identity in twice]


def _zeros(num_pages: int, page_bytes: int) -> ByteArray:
    try:
        return np.zeros((num_pages, page_bytes), np.uint8)
    except (MemoryError, ValueError) as error:
        raise ConfigError(f"--offload-bytes: no memory for {num_pages} pages of {page_bytes} bytes") from error


def _open_unnamed(directory: str, num_bytes: int) -> int:
    try:
        with tempfile.TemporaryFile(dir=directory or None, prefix="baton-cold-", buffering=0) as file:
            fd = os.dup(file.fileno())
    except OSError as error:
        raise ConfigError(f"--offload-dir {directory!r}: {error}") from error
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"no room for {num_bytes} bytes in {directory or 'the temporary folder'}") from error
    return fd
