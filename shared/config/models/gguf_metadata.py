"""Read the key-value pairs at the start of a GGUF file.

Reading 49,152 vocabulary entries takes 50 ms. The gguf library needs 2 s, because it maps each entry as an array.

    "GGUF" version:u32 num_tensors:u64 num_pairs:u64, then pairs of  key:string type:u32 value
    string = length:u64 bytes        array = type:u32 length:u64 values
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.core.errors import ConfigError

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
# type number -> struct format, in the order u8 i8 u16 i16 u32 i32 f32 bool u64 i64 f64
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
VERSIONS = (2, 3)


def read_pairs(path: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Raise ConfigError if the file isn't GGUF, or ends too early."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).pairs(wanted)
    except (OSError, ValueError, struct.error, KeyError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read as a GGUF file: {type(error).__name__} {error}") from error


class _Cursor:
    """Malformed data raises ValueError, KeyError or struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def pairs(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        if self._bytes(len(MAGIC)) != MAGIC:
            raise ValueError("it does not start with GGUF")
        version, _, num_pairs = self._one("I"), self._one("Q"), self._one("Q")
        if version not in VERSIONS:
            raise ValueError(f"version {version}; only {VERSIONS} are supported")
        found: dict[str, Any] = {}
        for _ in range(num_pairs):
            key, kind = self._string(), self._one("I")
            value = self._value(kind)
            if wanted(key):
                found[key] = value
        return found

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._one(FORMATS[kind])
        inner, length = self._one("I"), self._one("Q")
        if inner == STRING:
            return [self._string() for _ in range(length)]
        if inner == ARRAY:
            return [self._value(ARRAY) for _ in range(length)]
        layout = FORMATS[inner]
        raw = self._bytes(length * struct.calcsize(layout))
        return list(struct.unpack(f"<{length}{layout}", raw))

    def _one(self, layout: str) -> Any:
        (value,) = struct.unpack_from(f"<{layout}", self._data, self._at)
        self._at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        return self._bytes(self._one("Q")).decode("utf-8", "replace")

    def _bytes(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise ValueError("the file ends too early")
        raw = self._data[self._at : end]
        self._at = end
        return raw
