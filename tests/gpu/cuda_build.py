"""`make test-cuda-build`: torch's CUDA build in an environment of its own, and what it says without a driver.

    python tests/gpu/cuda_build.py [--torch 2.11.0] [--index URL] [--remove]

Downloads about 2.6 GB the first time. Not in CI: once before a release, and when torch's version changes. The wheel of
the public index is the CUDA one; an index that offers another must be named, and a build without CUDA is refused.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "cuda-build"
INDEX = "https://pypi.org/simple"
TORCH = "2.11.0"
NEEDED_BYTES = 8 << 30  # of disk: 5 GB when all is done
TESTS_NEED = ("transformers", "hypothesis", "pytest", "httpx")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=TORCH, help="version (default: %(default)s)")
    parser.add_argument("--index", default=INDEX, help="of packages (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the environment (default: %(default)s)")
    parser.add_argument("--remove", action="store_true", help="remove the environment afterwards")
    args = parser.parse_args()
    try:
        make(args.folder, args.torch, args.index)
        command = [str(python_of(args.folder)), "-m", "tests.gpu.cuda_contracts"]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
    finally:
        if args.remove:
            shutil.rmtree(args.folder, ignore_errors=True)


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def make(folder: Path, version: str, index: str) -> None:
    """Nothing to do where it is finished."""
    stamp, told = folder / "stamp", f"{version} {requirements()}"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == told:
        return
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise SystemExit(f"{folder}: {free / 1e9:.1f} GB are free, {NEEDED_BYTES / 1e9:.1f} GB are needed")
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    install(folder, index, f"torch=={version}")
    pins = folder / "constraints.txt"
    pins.write_text("\n".join(line for line in lines_of("constraints.txt") if not line.startswith("torch==")))
    install(folder, index, "-c", str(pins), *requirements(), *TESTS_NEED)
    stamp.write_text(told, encoding="utf-8")


def requirements() -> list[str]:
    """Baton's own, but for torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [line for line in project["dependencies"] if not line.startswith("torch")]


def lines_of(name: str) -> list[str]:
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def install(folder: Path, index: str, *words: str) -> None:
    """From that index and from nowhere else, whatever this machine's pip is told otherwise."""
    command = [str(python_of(folder)), "-m", "pip", "install", "--isolated", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--index-url", index, *words]
    environment = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
