"""Kernels compiled ahead of time for GPUs that are not here: the heaviest variant of each, and what is refused."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import ahead

if reason := ahead.reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

PACKAGE = Path(__file__).resolve().parents[4] / "shared" / "gpu_kernel"


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield file.stem, node


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_the_heaviest_variants_fit() -> None:
    """In a process of its own: this one may interpret."""
    command = (sys.executable, "-m", "tests.support.kernels.ahead")
    done = subprocess.run(command, cwd=ahead.ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    for module, function in functions():
        if is_kernel(function) and function.name.endswith("_kernel"):
            rows = done.stdout.count(f"| {module}:{function.name} |")
            assert rows == len(ahead.FEW_CHIPS), "not in its real_signatures"


def test_the_page_has_every_kernel() -> None:
    page = (ahead.ROOT / "docs" / "gpu-kernels.md").read_text()
    for module, function in functions():
        if is_kernel(function) and function.name.endswith("_kernel"):
            rows = page.count(f"| {module}:{function.name} |")
            assert rows == len(ahead.CHIPS), f"{function.name}: run {ahead.COMMAND}"


SLIPS = """
import sys
import torch, triton, triton.language as tl
from shared.gpu_kernel.launch.launcher import launch, recorded
from tests.support.kernels import ahead

EXACT = True

@triton.jit
def product_kernel(x, y, out):
    tl.store(out, tl.load(x) * tl.floor(tl.load(y)) + tl.load(x))

@triton.jit
def quotient_kernel(x, y, out):
    tl.store(out, tl.load(x) / tl.load(y))

@triton.jit
def exact_quotient_kernel(x, y, out):
    tl.store(out, tl.math.div_rn(tl.load(x), tl.load(y)))

@triton.jit
def wide_kernel(x, y, out):
    place = tl.arange(0, 65536)
    held = tl.load(x + place)
    tl.store(y + place, held)
    tl.debug_barrier()
    tl.store(out + place, held * held)

for kernel in (product_kernel, quotient_kernel, exact_quotient_kernel, wide_kernel):
    x = torch.empty(65536, device="meta")
    with recorded() as seen:
        launch(kernel, (1,), x, x, x)
    for chip in (80, 120):
        print(kernel.fn.__name__, *ahead.compile_now(*seen, kernel, chip).complaints(), sep=", ")
"""


def test_real_slips_are_seen(tmp_path: Path) -> None:
    (tmp_path / "slips.py").write_text(SLIPS)
    done = subprocess.run(
        (sys.executable, "-m", "slips"),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ahead.ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    product, _, quotient, _, exact, _, wide, wide_too = done.stdout.splitlines()
    assert (product, exact) == ("product_kernel", "exact_quotient_kernel")
    assert quotient == "quotient_kernel, has a division that is not rounded to nearest, and must have the CPU's bits"
    assert "spills" in wide and "spills" in wide_too


def test_launched_kernels_are_named_so() -> None:
    """A kernel by another name could be left out of `real_signatures` unseen."""
    launched = [
        (module, ast.unparse(call.args[0]))
        for module, function in functions()
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "launch"
    ]
    kernels = {(module, function.name) for module, function in functions() if is_kernel(function)}
    assert launched
    for module, name in launched:
        assert name.endswith("_kernel") and (module, name) in kernels, f"{module}: {name}"
