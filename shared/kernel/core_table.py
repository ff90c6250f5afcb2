"""The table of cores that the nodes of one machine share: a file in memory, and a locked file for each node in it.

    folder/table      a line of words for each core (core_words.py), mapped by every node
    folder/slot-07    says who has slot 7, and is locked as long as that process lives
    folder/gate       locked while a node enters, leaves, or removes dead ones

The system drops a lock with its process, so a slot whose file can be locked is a dead node's, in whatever container
that ran. Nodes of other users have a folder of their own. The last one to go takes the folder with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from shared.kernel.team import Place, Team, system_calls

SHARED_MEMORY = Path("/dev/shm")
FOLDER = "baton-cores-{}-1"  # of a user; another number when the words change: nodes of two versions do not share
TABLE, GATE, SLOT_NAME = "table", "gate", "slot-{:02}"
MOST_CORES = 1024
COMING_S, GOING_S, LOOK_S = 5.0, 1.0, 0.005  # the longest wait at the gate, and between two looks


class NoTable(Exception):
    """Nodes can't share cores here; says why."""


@dataclass(frozen=True, slots=True)
class Owner:
    """What a node says of itself in its slot's file. `borrows`: the cores it uses besides its own when it may."""

    node: str
    own: tuple[int, ...]
    borrows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CoreUse:
    """A moment of one core, for people to read. Nodes by name."""

    core: int
    holders: tuple[str, ...]
    guest: str | None


class CoreTable:
    """This process's slot in the machine's table. Used by one thread: its team's threads use the words alone."""

    def __init__(self, owner: Owner, folder: Path | None = None) -> None:
        """NoTable where there is none to be had. `folder`: another than the machine's, for tests."""
        from shared.kernel import core_words  # numba, which is not there everywhere

        self.owner, self._code = owner, core_words
        self._folder = folder or SHARED_MEMORY / FOLDER.format(os.getuid())
        calls = system_calls()
        if calls is None:
            raise NoTable("threads can't wait for each other on this system")
        if not owner.own or max(owner.own + owner.borrows) >= MOST_CORES:
            raise NoTable(f"cores of its own, numbered below {MOST_CORES}, are needed")
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
        """On the own cores, and on those that may be borrowed; the first own one is the leader's. To be closed before
        the table is."""
        borrowed = [core for core in self.owner.borrows if core not in self.owner.own]
        own = [Place(self._line(core), True, core) for core in self.owner.own]
        places = [*own, *(Place(self._line(core), False, core) for core in borrowed)]
        return Team(places=places, slot=self.slot, memory=self._words)

    def hold_own(self) -> None:
        """For as long as the node lives: nobody borrows them."""
        for core in self.owner.own:
            self._hold(self._line(core), self.slot)

    def borrowed(self) -> list[int]:
        """Cores on which this node is a guest now."""
        guests = self._words[:, 0] & self._code.GUEST
        return [int(core) for core in np.flatnonzero(guests == self.slot + 1)]

    def clear_up(self) -> None:
        """Behind nodes that were killed. A few file operations: every second or so. Waits for nobody."""
        with contextlib.suppress(OSError), through_gate(self._folder, 0.0):
            self._clear_dead()

    def uses(self) -> list[CoreUse]:
        """Of all cores that a node in the table has or would borrow."""
        owners = {slot: read_owner(self._path(slot)) for slot in [*self._others(), self.slot]}
        names = {slot: f"slot {slot}" if owner is None else owner.node for slot, owner in owners.items()}
        cores = {core for owner in owners.values() if owner is not None for core in owner.own + owner.borrows}
        return [self._use(core, names) for core in sorted(cores)]

    def close(self) -> None:
        """Nobody uses the team any more."""
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
                self._forget_all(slot)  # it may have been a dead node's
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
    """One process at a time, also where the folder is just being removed. OSError where the folder can't be used, or
    another process does not come out in time: it may be stopped."""
    until = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            check_private(folder)
            handle = os.open(folder / GATE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the last node went meanwhile, and took the folder
            continue
        try:
            if take_lock(handle) and is_at(handle, folder / GATE):
                yield
                return
        finally:
            os.close(handle)
        if time.monotonic() >= until:
            raise TimeoutError(0, f"{GATE} is locked by a process that does not go on")
        time.sleep(LOOK_S)


def check_private(folder: Path) -> None:
    """PermissionError where others could have made it or may write into it."""
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not folder.is_dir() or folder.is_symlink():
        raise PermissionError(0, "is not a folder of this user's alone")


def is_at(handle: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.lstat())
    return False


def map_file(path: Path, size: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, size)  # all of it: where memory is full, a page that is missing would end us
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)


def lock_if_free(path: Path) -> int | None:
    """A handle that holds the file's lock; None where a living process does."""
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
    """None where it is not written yet, or gone."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(path.read_text(encoding="utf-8"))
        return Owner(told["node"], tuple(told["own"]), tuple(told["borrows"]))
    return None
