"""Kernels compiled ahead of time for GPUs that are not here: the heaviest variant of each, and what is refused."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.kernels import ahead
from tests.support.kernels.ahead import Result

if reason := ahead.reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

PACKAGE = Path(__file__).resolve().parents[4] / "shared" / "gpu_kernel"
FINE = Result("shared.gpu_kernel.gate:gate_kernel", "gate_kernel (...)", 86, 255, 0, 99 * 1024, True, ())


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield file.stem, node


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_the_heaviest_variants_fit(tmp_path: Path) -> None:
    """In a process of its own: this one may interpret."""
    command = (sys.executable, "-m", "tests.support.kernels.ahead", "--table", str(tmp_path / "table.md"))
    done = subprocess.run(command, cwd=ahead.ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = (tmp_path / "table.md").read_text()
    for module, function in functions():
        if is_kernel(function) and function.name.endswith("_kernel"):
            assert rows.count(f"| {module}:{function.name} |") == len(ahead.FEW_CHIPS), "not in its real_signatures"


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


LIMITED = """
from pathlib import Path
import torch, triton, triton.language as tl
from shared.gpu_kernel.launch.launcher import launch, recorded
from tests.support.kernels import ahead

ahead.CACHE = Path(__file__).parent / "kept"

@triton.jit
def held_kernel(x, out):
    place = tl.arange(0, 8192)
    held = tl.load(x + place)
    tl.store(out + place, tl.sum(held) * held)

x = torch.empty(8192, device="meta")
for limit in (None, 32):
    with recorded() as seen:
        launch(held_kernel, (1,), x, x, max_registers=limit)
    result = ahead.compiled((*seen, 90))
    print(result.registers, result.local)
"""


def test_a_limit_of_registers_is_compiled_in_and_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "limited.py").write_text(LIMITED)
    done = subprocess.run(
        (sys.executable, "-m", "limited"),
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ahead.ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (free, nothing), (limited, spilled) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert free > 32 and nothing == 0
    assert limited == 32 and spilled > 0


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"local": 8}, "spills 8 bytes"),
        ({"registers": 256}, "256 registers"),
        ({"shared": 99 * 1024 + 1}, "of 99 KiB"),
        ({"inexact": ("a contracted product",)}, "has a contracted product"),
    ],
)
def test_what_is_refused(change: dict[str, object], words: str) -> None:
    assert FINE.complaints() == []
    (complaint,) = replace(FINE, **change).complaints()
    assert words in complaint


def test_a_chip_with_more_shared_memory_takes_more() -> None:
    assert replace(FINE, chip=90, shared=227 * 1024).complaints() == []


def test_only_exact_kernels_must_be_exact() -> None:
    assert replace(FINE, is_exact=False, inexact=("a contracted product",)).complaints() == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", "a contracted product"),
        ("fma.rn.f64 %fd1, %fd2, %fd3, %fd4;", "a contracted product"),
        ("div.full.f32 %f1, %f2, %f3;", "a division that is not rounded to nearest"),
        ("div.approx.f32 %f1, %f2, %f3;", "a division that is not rounded to nearest"),
        ("div.rn.f32 %f1, %f2, %f3;", ""),
        ("ex2.approx.f32 %f1, %f2;", "an approximation"),
        ("rsqrt.approx.f32 %f1, %f2;", "an approximation"),
        ("cvt.rmi.ftz.f32.f32 %f1, %f2;", "the smallest numbers taken for 0"),
        ("cvt.rmi.f32.f32 %f1, %f2;", ""),
        ("div.s32 %r1, %r2, %r3;", ""),
        ("mul.rn.f32 %f1, %f2, %f3;", ""),
        ("mad.lo.s32 %r1, %r2, %r3, %r4;", ""),
    ],
)
def test_lines_of_ptx_that_are_not_exact(line: str, found: str) -> None:
    assert [what for what, pattern in ahead.INEXACT.items() if pattern.search(line)] == ([found] if found else [])
