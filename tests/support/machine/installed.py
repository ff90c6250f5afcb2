"""Baton's wheel, environments that have it beside the dependencies of the current one, and bad company. All offline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from numba.core.caching import _CacheLocator

from shared.config.machine.cache_folder import kernels_folder
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.machine.small_site import closure, link_site

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("baton_serve", "router", "prefill_node", "decode_node", "shared", "deploy")
BESIDE = ("pyproject.toml", "README.md", "LICENSE")
ROUTER = Path("deploy", "router")  # the folder of the router's own distribution
OUTSIDE = ("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV")
MAKE_SDIST = "import setuptools.build_meta as build; build.build_sdist('.')"


def other_project(folder: Path) -> Path:
    """Fill the folder with somebody's packages of our names, which end a process that imports one."""
    for name in FOLDERS[1:]:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text("raise SystemExit(f'{__file__} is not a part of Baton')\n")
    return folder


def sources() -> list[str]:
    """What the repository has for the wheel, relative to it. Also for a source tree without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *FOLDERS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    return [str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts]


def copy_sources(folder: Path) -> Path:
    """To build from: builds write into the tree. An older version was built in it."""
    for name in (*sources(), *BESIDE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    other_project(folder / "build" / "lib")
    return folder


def build_wheel(folder: Path, source: Path | None = None) -> Path:
    """Of this tree, or of the project in `source`."""
    words = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder))
    pip(sys.executable, "wheel", *words, str(source or copy_sources(folder / "source")))
    (wheel,) = folder.glob("baton_*.whl")
    return wheel


def build_sdist(folder: Path) -> Path:
    source = copy_sources(folder)
    subprocess.run([sys.executable, "-c", MAKE_SDIST], cwd=source, capture_output=True, check=True)
    (sdist,) = source.glob("baton_serve-*.tar.gz")
    return sdist


def pip(python: str, *words: str) -> None:
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, timeout=HANG_GUARD_S)


class Environment:
    """A virtual environment with a wheel of Baton, and links to the packages that it needs.

    `project`: the folder in the repository whose pyproject.toml lists these packages."""

    def __init__(self, folder: Path, wheel: Path, project: Path = Path()) -> None:
        table = tomllib.loads((ROOT / project / "pyproject.toml").read_text("utf-8"))["project"]
        dependencies = link_site(folder / "dependencies", closure([*table["dependencies"], "pip"]))
        self.folder = folder / "venv"
        self.bin = self.folder / "bin"
        self.python = str(self.bin / "python")
        venv.EnvBuilder(symlinks=True).create(self.folder)
        (self.site,) = self.folder.glob("lib/python*/site-packages")
        (self.site / "dependencies.pth").write_text(f"{dependencies}\n")
        self.before = self.files()
        pip(self.python, "install", "--no-deps", "--no-index", str(wheel))

    def use_kernels_of_checkout(self) -> None:
        """Spare it half a minute, if this checkout has compiled kernels. Numba compares the dates of sources."""
        for folder in {index.parent.parent for index in (ROOT / "shared").rglob("__pycache__/*.nbi")}:
            there = self.site / "baton_serve" / "_code" / folder.relative_to(ROOT)
            kept = kernels_folder() / _CacheLocator.get_suitable_cache_subpath(str(there / "any.py"))
            shutil.copytree(folder / "__pycache__", kept, ignore=shutil.ignore_patterns("*.pyc"))
            for source in there.glob("*.py"):
                ours = folder / source.name
                if ours.is_file() and ours.read_bytes() == source.read_bytes():  # else it needs kernels of its own
                    shutil.copystat(ours, source)

    def uninstall(self) -> None:
        pip(self.python, "uninstall", "--yes", "baton-serve")

    def files(self) -> set[Path]:
        return {file for file in self.folder.rglob("*") if file.is_file() or file.is_symlink()}

    def variables(self, **more: str) -> dict[str, str]:
        """As in a shell that knows nothing of this checkout, nor of its environment."""
        return {name: value for name, value in os.environ.items() if name not in OUTSIDE} | more
