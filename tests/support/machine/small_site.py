"""Folders of links to chosen distributions: an environment with only these, made at once and offline."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.machine.patience import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[3]


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of these and of all that they ask for on this system."""
    found: set[str] = set()
    open_ones = [Requirement(text) for text in requirements]
    while open_ones:
        wanted = open_ones.pop()
        name = canonicalize_name(wanted.name)
        if name in found or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        open_ones += [Requirement(text) for text in distribution(name).requires or []]
    return found


def link_site(folder: Path, names: Iterable[str]) -> Path:
    """A folder for sys.path with these distributions and none else."""
    folder.mkdir()
    for name in names:
        for top in top_entries(name):
            link = folder / top.name
            if not link.exists():
                link.symlink_to(top)
    return folder


def top_entries(name: str) -> set[Path]:
    """What a distribution has directly in site-packages; its scripts lie elsewhere and are left out."""
    own = distribution(name)
    assert isinstance(own, PathDistribution) and own.files
    tops = {file.parts[0] for file in own.files} - {"..", "__pycache__"}
    return {Path(str(own.locate_file(top))) for top in tops}


def num_bytes(name: str) -> int:
    """Of all its files but bytecode, which comes with use."""
    files = [Path(str(file.locate())) for file in distribution(name).files or [] if file.suffix != ".pyc"]
    return sum(file.stat().st_size for file in files if file.is_file())


def command_in(site: Path, code: str, *args: str) -> list[str]:
    """Runs code with the standard library, that folder and this checkout, and nothing else, in its path."""
    head = f"import sys; sys.path[:0] = [{str(site)!r}, {str(ROOT)!r}]; "
    return [sys.executable, "-I", "-S", "-c", head + code, *args]


def run_in(site: Path, code: str, *args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = command_in(site, code, *args)
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)
