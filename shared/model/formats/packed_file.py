"""Write and check a file of tensors that many processes map.

    tensors     one after another, each at a multiple of 64 bytes
    directory   JSON: `about`, and each tensor's name, dtype, shape and offset
    trailer     magic, offset and length of the directory, then xxh3_128 of all bytes before this digest

The directory comes last, so that tensors can be written as they are made. A truncated file has no trailer. The digest
finds accidental damage, not attacks.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import xxhash

from shared.core.errors import BatonError

VERSION = 1
MAGIC = b"BatonPk" + bytes([VERSION])
ALIGNMENT = 64
TRAILER = struct.Struct("<8sQQ16s")
READ_AT_ONCE = 16 << 20
About = Mapping[str, str]


class BrokenFile(BatonError):
    """A packed file is damaged; the message says how."""


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """A tensor in the directory. `note`: a text from the caller of `add`."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    note: str = ""


class PackedWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._at = 0
        self._entries: dict[str, dict[str, Any]] = {}

    def add_tensor(self, name: str, data: memoryview, dtype: str, shape: tuple[int, ...], note: str = "") -> None:
        """Write one tensor of contiguous `data`. Raises OSError for a full disk."""
        self._write(bytes(-self._at % ALIGNMENT))
        self._entries[name] = {
            "dtype": dtype, "shape": shape, "offset": self._at, "num_bytes": data.nbytes, "note": note
        }  # fmt: skip
        self._write(data.cast("B"))

    def finish(self, about: About) -> None:
        self._write(bytes(-self._at % ALIGNMENT))
        start, directory = self._at, json.dumps({"about": dict(about), "tensors": self._entries}).encode()
        self._write(directory)
        self._write(TRAILER.pack(MAGIC, start, len(directory), b"")[:-16])
        self._file.write(self._digest.digest())
        self._file.flush()

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._at += len(data)


class MappedFile:
    """A checked file. Processes share the mapped memory, which outlives the file's removal."""

    def __init__(self, fd: int) -> None:
        """Map the open file `fd`, which may then be closed. Raises BrokenFile."""
        self.num_bytes = os.fstat(fd).st_size
        if self.num_bytes < TRAILER.size:
            raise BrokenFile(f"it has {self.num_bytes} bytes")
        self.data = mmap.mmap(fd, self.num_bytes, prot=mmap.PROT_READ)
        self.about, self.entries = self._read_directory()

    def _read_directory(self) -> tuple[About, Mapping[str, PackedEntry]]:
        magic, start, length, digest = TRAILER.unpack_from(self.data, self.num_bytes - TRAILER.size)
        if magic != MAGIC:
            raise BrokenFile("it does not end as a packed file must")
        with memoryview(self.data) as whole:
            found = xxhash.xxh3_128()
            for at in range(0, self.num_bytes - 16, READ_AT_ONCE):
                found.update(whole[at : min(at + READ_AT_ONCE, self.num_bytes - 16)])
        if found.digest() != digest:
            raise BrokenFile("its contents have changed since it was written")
        directory = json.loads(self.data[start : start + length])
        entries = {name: _entry(**fields) for name, fields in directory["tensors"].items()}
        return directory["about"], entries


def _entry(shape: list[int], **fields: Any) -> PackedEntry:
    return PackedEntry(shape=tuple(shape), **fields)


def read_about(fd: int) -> About:
    """Return the description `about`, without a check of the digest. Raises BrokenFile."""
    try:
        num_bytes = os.fstat(fd).st_size
        magic, start, length, _ = TRAILER.unpack(os.pread(fd, TRAILER.size, num_bytes - TRAILER.size))
        about: About = json.loads(os.pread(fd, min(length, num_bytes), start))["about"]
    except (OSError, ValueError, LookupError, TypeError, OverflowError, struct.error) as error:
        raise BrokenFile("its description can't be read") from error
    if magic != MAGIC:
        raise BrokenFile("it is of another version")
    return about
