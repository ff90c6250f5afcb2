"""Write answers line by line to a file from which a later run resumes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from deploy.tools.generate.lines import ID_HEAD, name_digest
from shared.core.errors import BatonError, ConfigError

LINE_HEAD = f'{{"id":"{ID_HEAD}'.encode()


class BatchStopped(BatonError, code="batch_stopped"):
    """The run can't go on. Written lines stay."""


class ResponsePart(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: object


class ErrorPart(msgspec.Struct, frozen=True):
    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True):
    """A line of OpenAI's batch output and error files. `id` comes first, so that even a torn line can be recognised."""

    id: str
    custom_id: str | None
    response: ResponsePart | None
    error: ErrorPart | None


class KnownLine(msgspec.Struct, frozen=True):
    id: str
    custom_id: str | None


class LineFile:
    """Own the file, refuse a second writer, and write whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}") from None
        try:
            self._require_file()
            self._lock()
            self._end = end_of_whole_lines(path)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def is_empty(self) -> bool:
        return self._end == 0

    def lines(self) -> Iterator[KnownLine]:
        """Yield the lines of earlier runs. Raise ConfigError if another program wrote the file."""
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    return
                try:
                    line = msgspec.json.decode(raw, type=KnownLine)
                except (msgspec.MsgspecError, UnicodeError):
                    line = None
                if line is None or not line.id.startswith(ID_HEAD):
                    raise not_ours(self.path, number)
                yield line

    def drop_torn_line(self) -> bool:
        """Cut off a torn last line. Return whether there was one. Call it after `lines`."""
        is_torn = os.fstat(self._fd).st_size > self._end
        if is_torn:
            os.ftruncate(self._fd, self._end)
        return is_torn

    def clear(self) -> None:
        os.ftruncate(self._fd, 0)
        self._end = 0

    def append(self, line: OutputLine) -> None:
        """Write one line. If the write fails, restore the file and raise BatchStopped."""
        data = msgspec.json.encode(line) + b"\n"
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise BatchStopped(f"{self.path} can no longer be written ({error.strerror})") from None
        self._end += len(data)

    def close(self, *, keep_empty: bool = True) -> None:
        with contextlib.suppress(OSError):  # some file systems can't sync
            os.fsync(self._fd)
        if self.is_empty and not keep_empty:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _require_file(self) -> None:
        """Refuse devices: they can't be truncated, and must not be removed."""
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ConfigError(f"{self.path} is not a plain file, so a later run could not go on from it")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another baton generate is writing {self.path}") from None


def end_of_whole_lines(path: Path) -> int:
    """Return the size in bytes up to the last newline. Raise ConfigError if the bytes after it do not begin like our
    lines."""
    end = number = 0
    tail = b""
    with path.open("rb") as file:
        for raw in file:
            number += 1
            if raw.endswith(b"\n"):
                end += len(raw)
            else:
                tail = raw
    if not (tail.startswith(LINE_HEAD) or LINE_HEAD.startswith(tail)):
        raise not_ours(path, number)
    return end


def not_ours(path: Path, number: int) -> ConfigError:
    return ConfigError(f"{path} is not a file of answers (line {number}) and stays unchanged: name another one")


def answered_in(file: LineFile) -> dict[bytes, str]:
    """Map the digest of each custom_id to the id of its newest answer."""
    return {name_digest(line.custom_id): line.id for line in file.lines() if line.custom_id is not None}
