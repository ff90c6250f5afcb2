"""Packages for a GPU machine without network: packed where there is one, installed there as far as they are missing.

    python -m tests.gpu.wheels [--python 3.12] [--out build/gpu-wheels]

The machine must have what is large: torch with CUDA and what torch needs, and transformers for the checks. Everything
else that Baton imports to serve is packed, in the versions of constraints.txt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu-wheels"
THERE = ("torch", "numpy")  # too large to take along
NOT_NEEDED = ("numba", "llvmlite", "huggingface-hub", "httpx2")  # a CPU's kernels, downloads
# what the others need in turn, and tests use
MORE = (
    "anyio", "certifi", "click", "h11", "httpcore", "httpx", "idna", "markdown-it-py", "markupsafe", "mdurl",
    "pygments", "pyyaml", "sniffio", "tqdm", "typing-extensions",
)  # fmt: skip
GLIBC = (17, 24, 27, 28, 31, 34)  # pip takes exactly the tags that it is told
Version = tuple[str, str]  # name, version


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="of the GPU machine (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="(default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for old in args.out.glob("*.whl"):
        old.unlink()
    shutil.rmtree(args.out / "site", ignore_errors=True)  # what older ones were installed into
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", args.python, "--implementation", "cp", "--dest", str(args.out)]
    command += [word for tag in platforms() for word in ("--platform", tag)]
    done = subprocess.run([*command, *wanted()], check=False)
    files = sorted(args.out.glob("*.whl"), key=lambda file: -file.stat().st_size)
    for file in files:
        print(f"{file.stat().st_size / (1 << 20):7.2f} MiB  {file.name}")
    print(f"{sum(file.stat().st_size for file in files) / (1 << 20):7.2f} MiB in {len(files)} files, in {args.out}")
    return done.returncode


def platforms() -> list[str]:
    return [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]


def wanted() -> list[str]:
    """As name==version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[<>=;]", line)[0].strip() for line in project["dependencies"]]
    names = [name for name in names if name not in (*THERE, *NOT_NEEDED)]
    pins = dict(line.split("==") for line in constraints())
    return [f"{name}=={pins[name]}" for name in (*names, *MORE)]


def constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if "==" in line]


def install_missing(wheels: Path) -> Path | None:
    """A folder with the packages of `wheels` that this Python has not; None where it has them all."""
    missing = [file for file in sorted(wheels.glob("*.whl")) if not is_installed(file)]
    if not missing:
        return None
    site, half = wheels / "site", wheels / "site.half"
    if not site.exists():
        shutil.rmtree(half, ignore_errors=True)  # an installation that was cut off
        install(missing, half)
        half.rename(site)
    return site


def is_installed(wheel: Path) -> bool:
    try:
        importlib.metadata.version(wheel.name.split("-")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def install(wheels: Sequence[Path], site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(site), *map(str, wheels)], check=True)


if __name__ == "__main__":
    sys.exit(main())
