"""Keep packed weights in a folder: one file per model and layout, made by one process and mapped by all.

    .lock                     held (flock) while a file is made, so two nodes that start together pack once
    SLOT-CODE.packed          SLOT: digest of contents and processor; CODE: digest of the code that packs
    SLOT-CODE.packed.PID.draft    a file being made; if its process is killed, the next process that packs removes it

The folder (mode 0700) and its files (0600) must belong to this user. Both are checked on open descriptors. A mapped
file has a shared lock, so that no process removes it to make room. The kernel drops a killed process's locks. After any
failure the caller packs into its own memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shared.config.machine.cache_folder import packed_folder
from shared.core.errors import BatonError
from shared.model.formats.packed_file import BrokenFile, MappedFile, PackedWriter, read_about

LOCK, ENDING, DRAFT = ".lock", ".packed", ".draft"
OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block us
WAIT_S, LOOK_S = 300.0, 0.05
GIB = 1 << 30
_log = logging.getLogger(__name__)


class PackedRefused(BatonError):
    """Packed weights are not kept in a file; the message says why."""


@dataclass(frozen=True, slots=True)
class PackedKey:
    """Everything on which a file's bits depend."""

    about: Mapping[str, str]
    code: str

    @property
    def whole(self) -> dict[str, str]:
        return {**self.about, "code": self.code}

    @property
    def slot(self) -> str:
        return _short(repr(sorted(self.about.items())))

    @property
    def name(self) -> str:
        return f"{self.slot}-{_short(self.code)}{ENDING}"


@dataclass(frozen=True, slots=True)
class Listed:
    name: str
    num_bytes: int
    used: float  # time of last use, in seconds since 1970
    in_use: bool
    about: Mapping[str, str]  # empty if unreadable


class PackedFolder:
    """A user's packed files, of at most `max_bytes` in total."""

    def __init__(self, path: Path, max_bytes: int, wait_s: float = WAIT_S) -> None:
        self.path, self._max_bytes, self._wait_s = path, max_bytes, wait_s
        self.mapped_bytes = 0  # bytes that this process has mapped; the system counts them as free memory

    def take_file(self, key: PackedKey, need: int, write: Callable[[PackedWriter], None]) -> MappedFile | None:
        """Return the key's file, mapped and checked. On failure, log one line and return None.

        `write` makes a missing or damaged file. `need`: the file's approximate size in bytes.
        """
        try:
            file = self._take_file(key, need, write)
        except (OSError, PackedRefused, BrokenFile) as error:
            _log.warning("the weights are packed in this process's own memory: %s", error)
            return None
        self.mapped_bytes += file.num_bytes
        return file

    def listed(self) -> list[Listed]:
        """Return all files, most recently used first. Raises PackedRefused, OSError."""
        if not self.path.is_dir():
            return []
        with _opened(self.path) as folder:
            return [_describe(folder, name) for name in reversed(_names(folder))]

    def clear(self) -> list[Listed]:
        """Remove all files, and return their list. Raises PackedRefused, OSError.

        Mapped files keep their space until they are unmapped.
        """
        found = self.listed()
        if self.path.is_dir():
            with _opened(self.path) as folder:
                with contextlib.suppress(BlockingIOError), _locked(folder, wait_s=0):
                    _remove_drafts(folder)
                for one in found:
                    _unlink(folder, one.name)
        return found

    def _take_file(self, key: PackedKey, need: int, write: Callable[[PackedWriter], None]) -> MappedFile:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(self.path) as folder:
            with contextlib.suppress(FileNotFoundError, BrokenFile):
                return _map(folder, key)
            try:
                with _locked(folder, self._wait_s):
                    return self._make(folder, key, need, write)
            except BlockingIOError:
                raise PackedRefused(f"another process has packed for {self._wait_s:g} s") from None

    def _make(self, folder: int, key: PackedKey, need: int, write: Callable[[PackedWriter], None]) -> MappedFile:
        try:
            return _map(folder, key)  # made by another process while this one waited
        except FileNotFoundError:
            pass
        except BrokenFile as error:
            _log.warning("%s is packed anew: %s", self.path / key.name, error)
            _unlink(folder, key.name)
        _remove_drafts(folder)
        self._make_room(folder, need)
        started = time.monotonic()
        _write(folder, key, write)
        for name in _names(folder):
            if name.startswith(key.slot) and name != key.name:  # packed by other code
                _remove_unused(folder, name)
        _log.info("packed the weights in %.1f s into %s", time.monotonic() - started, self.path / key.name)
        return _map(folder, key)

    def _make_room(self, folder: int, need: int) -> None:
        sizes = {name: os.stat(name, dir_fd=folder, follow_symlinks=False).st_size for name in _names(folder)}
        if need > self._max_bytes:
            raise PackedRefused(f"{_gib(need)} are more than --packed-bytes allows ({_gib(self._max_bytes)})")
        for name in sizes:
            if sum(sizes.values()) + need > self._max_bytes and _remove_unused(folder, name):
                sizes[name] = 0
        if sum(sizes.values()) + need > self._max_bytes:
            raise PackedRefused(f"files in use leave no {_gib(need)} of --packed-bytes ({_gib(self._max_bytes)})")
        disk = os.fstatvfs(folder)
        if disk.f_bavail * disk.f_frsize < need:
            raise PackedRefused(f"the disk of {self.path} has no {_gib(need)} left")


def packed_of(max_bytes: int) -> PackedFolder | None:
    """Return this user's folder, or None if `max_bytes` is 0 or the user has no home."""
    if not max_bytes:
        return None
    try:
        return PackedFolder(packed_folder(), max_bytes)
    except RuntimeError:  # a user without a home
        _log.warning("the weights are packed in this process's own memory: no home folder, and no XDG_CACHE_HOME")
        return None


def _map(folder: int, key: PackedKey) -> MappedFile:
    """Map the key's file. Raises FileNotFoundError or BrokenFile.

    A file is broken if it has changed, if it has another key, or if other users could have written it.
    """
    try:
        fd = os.open(key.name, OPEN, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BrokenFile("it is a symbolic link") from None
        raise
    try:
        found = os.fstat(fd)
        if not (stat.S_ISREG(found.st_mode) and _is_private(found)):
            raise BrokenFile("others could have written it")
        fcntl.flock(fd, fcntl.LOCK_SH)  # the map copies the descriptor, and so keeps the lock
        file = MappedFile(fd)
        if file.about != key.whole:
            raise BrokenFile("its description is another model's")
        with contextlib.suppress(OSError):
            os.utime(fd)  # records the time of last use
    finally:
        os.close(fd)
    return file


def _write(folder: int, key: PackedKey, write: Callable[[PackedWriter], None]) -> None:
    draft = f"{key.name}.{os.getpid()}{DRAFT}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, 0o600, dir_fd=folder), "wb") as file:
            writer = PackedWriter(file)
            write(writer)
            writer.finish(key.whole)
            os.fsync(file.fileno())
        os.rename(draft, key.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        _unlink(folder, draft)
        raise


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open the folder. Raises PackedRefused if other users could have written to it."""
    fd = os.open(path, OPEN | os.O_DIRECTORY)
    try:
        if not _is_private(os.fstat(fd)):
            raise PackedRefused(f"{path} must belong to the user who runs this, with mode 0700")
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(folder: int, wait_s: float) -> Iterator[None]:
    """Hold the folder's lock. Raises BlockingIOError after `wait_s`."""
    fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    give_up, has_logged = time.monotonic() + wait_s, False
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise
            if not has_logged:
                _log.info("another process packs weights: waiting for it")
                has_logged = True
            time.sleep(LOOK_S)
        yield
    finally:
        os.close(fd)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as found:
        used = {one.name: one.stat(follow_symlinks=False).st_mtime for one in found if one.name.endswith(ENDING)}
    return sorted(used, key=lambda name: used[name])


def _remove_drafts(folder: int) -> None:
    for name in os.listdir(folder):
        if name.endswith(DRAFT):
            _unlink(folder, name)


def _remove_unused(folder: int, name: str) -> bool:
    if _in_use(folder, name):
        return False
    _unlink(folder, name)
    return True


def _in_use(folder: int, name: str) -> bool:
    try:
        fd = os.open(name, OPEN | os.O_RDWR, dir_fd=folder)  # on NFS only a writer may lock exclusively
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _describe(folder: int, name: str) -> Listed:
    found, about = os.stat(name, dir_fd=folder, follow_symlinks=False), {}
    with contextlib.suppress(OSError, BrokenFile):
        fd = os.open(name, OPEN, dir_fd=folder)
        try:
            about = dict(read_about(fd))
        finally:
            os.close(fd)
    return Listed(name, found.st_size, found.st_mtime, _in_use(folder, name), about)


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and found.st_mode & 0o077 == 0


def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _short(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
