"""Compiles kernels ahead of time for GPUs that nobody has here, and looks at what came out.

    python -m tests.support.kernels.ahead           the heaviest variant of each kernel, for two chips
    python -m tests.support.kernels.ahead --all     every variant of real models, for all chips
    python -m tests.support.kernels.ahead --all --table docs/gpu-kernels.md     and writes what a chip needs

Refused: registers that spill, more than 255 of them, more shared memory than the chip gives one block, and in kernels
that must have the CPU's bits (EXACT in their module) contracted products, divisions that are not rounded to nearest,
approximations, and small numbers taken for 0.
What compiled is kept by its source's hash, so that a second run looks up.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.tiers import CANT_RUN_HERE, ROOT

CACHE = ROOT / ".pytest_cache" / "ahead"
# Chip: KiB of shared memory that one block may have. 86, 89 and 120 are consumer and inference cards.
CHIPS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
FEW_CHIPS = (80, 90)
MAX_REGISTERS = 255
FORMAT = 1  # rises when a result holds something else
INEXACT = {
    "a contracted product": re.compile(r"\bfma(\.\w+)*\.f(32|64)\b"),
    "a division that is not rounded to nearest": re.compile(r"\bdiv(?!\.rn)(\.\w+)*\.f(32|64)\b"),
    "an approximation": re.compile(r"\b(?!div\b)\w+(\.\w+)*\.approx\b"),
    "the smallest numbers taken for 0": re.compile(r"\.ftz\b"),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What one variant came to on one chip. `local`: bytes a thread keeps outside its registers."""

    kernel: str
    variant: str
    chip: int
    registers: int
    local: int
    shared: int
    is_exact: bool  # must be
    inexact: tuple[str, ...]

    def complaints(self) -> list[str]:
        found = []
        if self.local:
            found.append(f"spills {self.local} bytes a thread")
        if self.registers > MAX_REGISTERS:
            found.append(f"{self.registers} registers of {MAX_REGISTERS}")
        if self.shared > CHIPS[self.chip] * 1024:
            found.append(f"{self.shared} bytes of shared memory of {CHIPS[self.chip]} KiB")
        if self.is_exact:
            found += [f"has {what}, and must have the CPU's bits" for what in self.inexact]
        return found


def reason_to_skip() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "kernels are compiled ahead on Linux x86-64 only"
    if importlib.util.find_spec("triton") is None:
        return "Triton is missing: pip install -r tests/requirements.txt"
    return ""


def kernel_modules() -> list[str]:
    package = importlib.import_module("shared.gpu_kernel")
    names = (f"{package.__name__}.{found.name}" for found in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in names if hasattr(importlib.import_module(name), "real_signatures"))


def signatures_of(module: str) -> list:
    """Return those that the module declares, heaviest first: by the product of the sizes that are compiled in."""

    def weight(signature) -> tuple[int, str]:
        product = 1
        for _, value in signature.constants:
            product *= value if type(value) is int and value > 0 else 1
        return -product, signature.describe()

    return sorted(importlib.import_module(module).real_signatures(), key=weight)


def chosen(is_all: bool) -> list[tuple]:
    """Return (signature, chip) of what a run compiles."""
    pairs = []
    for module in kernel_modules():
        seen = set()
        for signature in signatures_of(module):
            if is_all or signature.kernel not in seen:
                pairs += [(signature, chip) for chip in (CHIPS if is_all else FEW_CHIPS)]
            seen.add(signature.kernel)
    return pairs


def compiled(pair: tuple) -> Result:
    """Return the kept result of this very source, or compile it."""
    signature, chip = pair
    kernel = signature.find_kernel()
    version, exact = importlib.metadata.version("triton"), is_exact(signature)
    parts = (FORMAT, version, kernel.cache_key, signature, options_of(signature), tuple(INEXACT.values()), exact, chip)
    path = CACHE / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.json"
    if path.exists():
        kept = json.loads(path.read_text())
        return Result(**{**kept, "inexact": tuple(kept["inexact"])})
    result = compile_now(signature, kernel, chip)
    CACHE.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(json.dumps(asdict(result)))
    own.replace(path)
    return result


def compile_now(signature, kernel, chip: int) -> Result:
    done = machine_code(signature, kernel, chip)
    with tempfile.TemporaryDirectory() as folder:
        registers, local = resources(done.asm["cubin"], Path(folder))
    inexact = tuple(what for what, pattern in INEXACT.items() if pattern.search(done.asm["ptx"]))
    exact, shared = is_exact(signature), done.metadata.shared
    return Result(signature.kernel, signature.describe(), chip, registers, local, shared, exact, inexact)


def machine_code(signature, kernel, chip: int):
    """Return what Triton compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {name: place for place, name in enumerate(kernel.arg_names)}
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in signature.aligned}
    source = ASTSource(kernel, dict(signature.types), dict(signature.constants), attributes)
    options = {"num_warps": signature.num_warps, "num_stages": signature.num_stages, **options_of(signature)}
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        return triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)


def options_of(signature) -> dict[str, object]:
    from shared.gpu_kernel.launch.launcher import OPTIONS, register_option

    return {**OPTIONS, **register_option(signature.max_registers)}


def is_exact(signature) -> bool:
    return getattr(importlib.import_module(signature.kernel.split(":")[0]), "EXACT", False)


def resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Return registers and bytes of local memory of a thread, as the vendor's own tool reads them."""
    from triton import knobs

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def table(results: Iterable[Result]) -> str:
    """Return a row for each kernel and chip: the most that a variant takes."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((result.kernel.removeprefix("shared.gpu_kernel."), result.chip), []).append(result)
    lines = ["| kernel | chip | variants | registers | spills | shared |", "|---|---|---|---|---|---|"]
    for (kernel, chip), group in sorted(groups.items()):
        most = [max(getattr(result, name) for result in group) for name in ("registers", "local", "shared")]
        lines.append(f"| {kernel} | sm_{chip} | {len(group)} | {most[0]} | {most[1]} | {most[2]:,} |")
    return "\n".join(lines)


def page_of(results: Iterable[Result]) -> str:
    from tests.support.gpus.gpu_counts import counted

    host = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.host_work"], cwd=ROOT, check=True, capture_output=True
    )
    code = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.step_code"], cwd=ROOT, check=True, capture_output=True
    )
    host_table, code_table = (done.stdout.decode().strip() for done in (host, code))
    return "\n".join((PAGE, table(results), COUNTED, counted(), CODE, code_table, HOST, host_table, LAUNCHED))


COMMAND = "python -m tests.support.kernels.ahead --all --table docs/gpu-kernels.md"
PAGE = f"""# Kernels in Triton, compiled ahead of time

The table shows, for each kernel and chip, the most that any variant needs: registers per thread, bytes that spill, and
bytes of shared memory. The variants come from a table of real models (shared/gpu_kernel/launch/real_models.py).
[gpu-results.md](gpu-results.md) tells what ran on a GPU. This page is written by
`{COMMAND}`.
"""
COUNTED = """
## A decode step, counted

The table shows the launches of one layer with the sizes of Llama 3.1 8B, and the bytes that a step of all 32 layers
reads and writes. Launches and bytes are counted on the "meta" device. "Least" counts each weight and each KV value
once, and "times" is GB divided by least GB. A step has one upload, one graph replay and one download
(tests/unit/shared/device/test_cuda_graphs.py counts them). Programs of attention are those of a step's graph; one
without keys ends at once. Sampling is not in the table: with top-k or top-p it reads the logits of an output three
times, without twice, and a greedy one once (shared/gpu_kernel/sample.py).
"""
CODE = """
## A layer's code, counted

What our kernels launch in one layer of the same steps (bfloat16, outside a graph), and how many instructions of machine
code the warps of each program run on sm_90: each counts once, so of a loop one turn. The products are the library's.
Counted by `python -m tests.support.kernels.step_code`.
"""
HOST = """
## A decode step, seen from the host

What the host does for each decode step that has a graph, whatever the network and the number of rows: uploads, replays
of a graph, launches beside it (torch's operators and our kernels) and downloads. Counted on the virtual GPU by
`python -m tests.support.kernels.host_work`. The host does not wait for the device.
"""
LAUNCHED = """
## A launch, counted

A kernel's first launch with a signature goes through Triton, which binds and looks up its code. Later launches find the
code by a key (shared/gpu_kernel/launch/bound.py). `python -m tests.support.kernels.launch_cost` counts the calls of
both ways and times them, with a driver that launches nothing. Calls by Triton and then: a norm 48 and 24, a gate 40 and
20, split attention with its merge 178 and 67, the largest logits 64 and 20. On two busy cores of a Zen 3 server, in one
run: a norm 41 and 13 us, a gate 22 and 5.5 us, split attention with its merge 65 and 20 us, the largest logits 20 and
5.8 us.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compiles kernels for GPUs that nobody has here.")
    parser.add_argument("--all", action="store_true", help="every variant of real models, all chips")
    parser.add_argument("--table", type=Path, help="a file that gets the table")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--needs", action="store_true", help="say why this machine can't, and end")
    args = parser.parse_args(argv)
    if reason := reason_to_skip():
        print(reason)
        return CANT_RUN_HERE
    if args.needs:
        return 0
    pairs = chosen(args.all)
    with ProcessPoolExecutor(args.jobs) as pool:
        results = list(pool.map(compiled, pairs))
    print(table(results))
    if args.table:
        args.table.write_text(page_of(results))
    complaints = [f"{result.variant} on sm_{result.chip}: {text}" for result in results for text in result.complaints()]
    print(*complaints, sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
