"""A file of answers that is whole after every line, whatever ends the program: it is what a later run goes on from."""

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


class BatchStopped(BatonError):
    """The run can't go on, for a reason that is none of its lines'. What is written stays, and counts."""

    code = "batch_stopped"


class ResponsePart(msgspec.Struct, frozen=True):
    """`body`: the server's JSON."""

    status_code: int
    request_id: str
    body: object


class ErrorPart(msgspec.Struct, frozen=True):
    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True):
    """A line of OpenAI's batch output and error files. `id` stands first: torn lines are known by it."""

    id: str
    custom_id: str | None
    response: ResponsePart | None
    error: ErrorPart | None


class KnownLine(msgspec.Struct, frozen=True):
    """What a later run reads of a line."""

    id: str
    custom_id: str | None


class LineFile:
    """Owns the file: a second run that would write it is refused. Only whole lines are ever left behind."""

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
        """What earlier runs left. ConfigError for a file that is not of this form: it is somebody's, and stays."""
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
        """Call it after `lines`: what a crash left of a line goes. Returns whether there was one."""
        is_torn = os.fstat(self._fd).st_size > self._end
        if is_torn:
            os.ftruncate(self._fd, self._end)
        return is_torn

    def clear(self) -> None:
        os.ftruncate(self._fd, 0)
        self._end = 0

    def append(self, line: OutputLine) -> None:
        """On a full disk, BatchStopped, and the file as it was."""
        data = msgspec.json.encode(line) + b"\n"
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            raise BatchStopped(f"{self.path} can't be written any more ({error.strerror})") from None
        self._end += len(data)

    def close(self, *, keep_empty: bool = True) -> None:
        with contextlib.suppress(OSError):  # some file systems have none
            os.fsync(self._fd)
        if self.is_empty and not keep_empty:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _require_file(self) -> None:
        """A device would not be cut where a line is torn, and must not be removed when it is empty."""
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ConfigError(f"{self.path} is no plain file, so that a later run could not go on from it")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another baton generate is writing {self.path}") from None


def end_of_whole_lines(path: Path) -> int:
    """Bytes up to the last newline. ConfigError where what follows it is not the beginning of a line of ours."""
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
    return ConfigError(f"{path} is no file of answers (line {number}), and stays as it is: name another one")


def answered_in(file: LineFile) -> dict[bytes, str]:
    """By the digest of its custom_id, the id of a line's newest answer."""
    return {name_digest(line.custom_id): line.id for line in file.lines() if line.custom_id is not None}
