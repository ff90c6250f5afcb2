"""How many instructions our kernels have in a layer of a decode step, compiled for one chip.

    python -m tests.support.kernels.step_code

Counted in the machine code that a program's warps run, each instruction once: of a loop, one turn.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest

from shared.gpu_kernel.launch import launcher
from shared.gpu_kernel.launch.signatures import Signature, signature_of
from tests.support.gpus.gpu_counts import COUNTED, count_step, llama
from tests.support.kernels import ahead

CHIP = 90
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP\b)\S", re.MULTILINE)
HEAD = "| rows | context | kernel | launches a layer | programs | warps of each | instructions |"


def launches_of_layer(batch: int, context: int) -> Counter[tuple[Signature, int]]:
    """Return how often one more layer launches a kernel with a number of programs."""
    two, three = (launches_of(layers, batch, context) for layers in (2, 3))
    return three - two


def launches_of(num_layers: int, batch: int, context: int) -> Counter[tuple[Signature, int]]:
    found: Counter[tuple[Signature, int]] = Counter()
    programs, check_grid = [0], launcher.check_grid

    def see_grid(kernel: Any, grid: tuple[int, ...]) -> tuple[int, int, int]:
        programs[0] = prod(grid)
        return check_grid(kernel, grid)

    def see_signature(*given: Any) -> Signature:
        signature = signature_of(*given)
        found[signature, programs[0]] += 1
        return signature

    with pytest.MonkeyPatch.context() as patch, launcher.recorded():
        patch.setattr(launcher, "check_grid", see_grid)
        patch.setattr(launcher, "signature_of", see_signature)
        count_step(llama(num_layers), batch, context)
    return found


@functools.cache
def instructions_of(signature: Signature) -> int:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(ahead.machine_code(signature, signature.find_kernel(), CHIP).asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-sass", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return len(INSTRUCTION.findall(text))


def counted() -> str:
    """Return a row for each kernel of each kind of step."""
    lines = [HEAD, "|---" * HEAD.count("| ") + "|"]
    for batch, context in COUNTED:
        for (signature, programs), launches in launches_of_layer(batch, context).items():
            instructions = instructions_of(signature)
            name, warps = signature.kernel.partition(":")[2], signature.num_warps
            lines.append(f"| {batch} | {context:,} | {name} | {launches} | {programs:,} | {warps} | {instructions:,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if reason := ahead.reason_to_skip():
        sys.exit(reason)
    print(counted())
