"""The table of cores that one machine's nodes share: a file in memory, and a locked file per node.

    folder/table      a line of words for each core (core_words.py), mapped by every node
    folder/slot-07    names the owner of slot 7, and is locked while that process lives
    folder/gate       locked while a node enters, leaves, or removes dead nodes

The system drops a dead process's locks, whichever container it ran in. So a slot file that can be locked belongs to a
dead node.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from shared.kernel.team.team import Team, WorkerPlace, system_calls

SHARED_MEMORY = Path("/dev/shm")
# {}: user id. Increase the last number when the layout of words changes: versions must not share a table.
FOLDER = "baton-cores-{}-1"
TABLE, GATE, SLOT_NAME = "table", "gate", "slot-{:02}"
MOST_CORES = 1024
# seconds: longest waits at the gate, to enter and to leave the table; pause between two tries
COMING_S, GOING_S, LOOK_S = 5.0, 1.0, 0.005


class NoTable(Exception):
    """Nodes can't share cores; the text says why."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A slot file's content."""

    node: str
    own: tuple[int, ...]
    borrows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CoreUse:
    core: int
    holders: tuple[str, ...]
    guest: str | None


class CoreTable:
    """This process's slot in the table. Only one thread calls its methods; the team's threads use only the words."""

    def __init__(self, owner: Owner, folder: Path | None = None) -> None:
        """Raise NoTable if nodes can't share cores here. `folder`: for tests."""
        from shared.kernel.team import core_words  # imports numba

        self.owner, self._code = owner, core_words
        self._folder = folder or SHARED_MEMORY / FOLDER.format(os.getuid())
        calls = system_calls()
        if calls is None:
            raise NoTable("threads can't wait for each other on this system")
        if not owner.own or max(owner.own + owner.borrows) >= MOST_CORES:
            raise NoTable(f"a node needs cores of its own, numbered below {MOST_CORES}, to share cores")
        self._calls = np.array(calls, np.int64)
        self._forget, self._hold = core_words.make_forget().ctypes, core_words.make_hold().ctypes
        try:
            with through_gate(self._folder, COMING_S):
                self._memory = map_file(self._folder / TABLE, MOST_CORES * core_words.LINE_BYTES)
                self._words = np.frombuffer(self._memory, np.int64).reshape(MOST_CORES, -1)
                self.slot, self._lock = self._take_slot()
        except OSError as error:
            raise NoTable(f"{self._folder}: {error.strerror}") from None

    def team(self) -> Team:
        """Return a team, to be closed before the table."""
        borrowed = [core for core in self.owner.borrows if core not in self.owner.own]
        own = [WorkerPlace(self._line(core), True, core) for core in self.owner.own]
        places = [*own, *(WorkerPlace(self._line(core), False, core) for core in borrowed)]
        return Team(places=places, slot=self.slot, memory=self._words)

    def hold_own(self) -> None:
        for core in self.owner.own:
            self._hold(self._line(core), self.slot)

    def borrowed(self) -> list[int]:
        guests = self._words[:, 0] & self._code.GUEST
        return [int(core) for core in np.flatnonzero(guests == self.slot + 1)]

    def clear_up(self) -> None:
        """Clean up after killed nodes, without waiting. Call this at most once a second: it takes some file
        operations."""
        with contextlib.suppress(OSError), through_gate(self._folder, 0.0):
            self._clear_dead()

    def uses(self) -> list[CoreUse]:
        owners = {slot: read_owner(self._path(slot)) for slot in [*self._others(), self.slot]}
        names = {slot: f"slot {slot}" if owner is None else owner.node for slot, owner in owners.items()}
        cores = {core for owner in owners.values() if owner is not None for core in owner.own + owner.borrows}
        return [self._use(core, names) for core in sorted(cores)]

    def close(self) -> None:
        """The team must not be in use."""
        with contextlib.suppress(OSError), through_gate(self._folder, GOING_S):
            self._clear_dead()
            self._clear(self.slot)
            os.close(self._lock)
            if not self._others():
                for name in (TABLE, GATE):
                    (self._folder / name).unlink(missing_ok=True)
                self._folder.rmdir()

    def _take_slot(self) -> tuple[int, int]:
        for slot in range(self._code.NUM_SLOTS):
            lock = lock_if_free(self._path(slot))
            if lock is None:
                continue
            try:
                self._forget_all(slot)  # claims of a dead node
                os.ftruncate(lock, 0)
                os.pwrite(lock, json.dumps(asdict(self.owner)).encode(), 0)
            except OSError:
                os.close(lock)
                raise
            return slot, lock
        raise NoTable(f"{self._code.NUM_SLOTS} nodes share the cores of this machine already")

    def _others(self) -> list[int]:
        return [n for n in range(self._code.NUM_SLOTS) if n != self.slot and self._path(n).exists()]

    def _clear_dead(self) -> None:
        for slot in self._others():
            lock = lock_if_free(self._path(slot))
            if lock is not None:
                self._clear(slot)
                os.close(lock)

    def _clear(self, slot: int) -> None:
        self._forget_all(slot)
        self._path(slot).unlink(missing_ok=True)

    def _forget_all(self, slot: int) -> None:
        for core in np.flatnonzero(self._words[:, :2].any(axis=1)):
            self._forget(self._calls.ctypes.data, self._line(int(core)), slot)

    def _use(self, core: int, names: dict[int, str]) -> CoreUse:
        word = int(self._words[core, 0])
        guest, holders = word & self._code.GUEST, word >> self._code.HOLDER
        held_by = tuple(name for slot, name in names.items() if holders >> slot & 1)
        return CoreUse(core, held_by, names.get(guest - 1) if guest else None)

    def _line(self, core: int) -> int:
        return int(self._words.ctypes.data) + core * self._words.strides[0]

    def _path(self, slot: int) -> Path:
        return self._folder / SLOT_NAME.format(slot)


@contextlib.contextmanager
def through_gate(folder: Path, patience_s: float) -> Iterator[None]:
    """Admit one process at a time, even if another one removes the folder meanwhile.

    Raise OSError if the folder can't be used, or if another process holds the gate too long."""
    until = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            check_private(folder)
            handle = os.open(folder / GATE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the last node removed the folder
            continue
        try:
            if take_lock(handle) and is_at(handle, folder / GATE):
                yield
                return
        finally:
            os.close(handle)
        if time.monotonic() >= until:
            raise TimeoutError(0, f"{GATE} is locked by a process that makes no progress")
        time.sleep(LOOK_S)


def check_private(folder: Path) -> None:
    """Raise PermissionError if another user could have made the folder or may write to it."""
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(0, "is not a private folder of this user")


def is_at(handle: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.lstat())
    return False


def map_file(path: Path, size: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # allocate all pages now: with full memory, touching a new one would kill this process
        os.posix_fallocate(handle, 0, size)
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)


def lock_if_free(path: Path) -> int | None:
    """Lock the file and return its handle, or return None if a living process holds the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if take_lock(handle):
        return handle
    os.close(handle)
    return None


def take_lock(handle: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def read_owner(path: Path) -> Owner | None:
    """Return the file's owner, or None if the file is gone or not written yet."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Owner(fields["node"], tuple(fields["own"]), tuple(fields["borrows"]))
    return None
