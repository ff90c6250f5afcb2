"""The noise in Triton's kernels: the same bits as in torch, interpreted, and nothing in the machine code that rounds
otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.kernel.sampling import noise
from tests.support.machine.patience import HANG_GUARD_S

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
gpu_noise = interpreter.kernels("noise")
launcher = interpreter.kernels("launch.launcher")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

LENGTH = 4096
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from shared.gpu_kernel import candidates, edits, logprobs, sample
for module in (sample, logprobs, edits, candidates):
    widest = {}
    for signature in sorted(module.real_signatures(), key=lambda one: one.describe()):
        widest[signature.kernel] = signature
    for signature in widest.values():
        kernel, options = signature.find_kernel(), {"num_warps": signature.num_warps, "enable_fp_fusion": False}
        place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
        attrs = {place[name]: [["tt.divisibility", 16]] for name in signature.aligned}
        constants = {place[name]: value for name, value in signature.constants}
        source = ASTSource(kernel, dict(signature.types), constants, attrs)
        for chip in map(int, sys.argv[1:]):
            print(triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options).asm["ptx"])
"""


@triton.jit
def values_kernel(values, bits, logs, exps, weights, gumbels, LENGTH: tl.constexpr):
    places = tl.arange(0, LENGTH)
    value = tl.load(values + places)
    tl.store(logs + places, gpu_noise.log(value))
    tl.store(exps + places, gpu_noise.exp(-value))
    tl.store(weights + places, gpu_noise.weight(-value))
    tl.store(gumbels + places, gpu_noise.gumbel(tl.load(bits + places)))


def test_the_arithmetic_has_torch_s_bits() -> None:
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.random(2048) * 80, rng.random(2044) * 1e-6, [1.0, 0.5, 2.0, 6e-8]])
    given = torch.from_numpy(np.maximum(values, 1e-30).astype(np.float32))
    bits = torch.from_numpy(rng.integers(0, 2**noise.NOISE_BITS, LENGTH).astype(np.int32))
    bits[:2] = torch.tensor([0, 2**noise.NOISE_BITS - 1])
    logs, exps, gumbels = (torch.zeros(LENGTH) for _ in range(3))
    weights = torch.zeros(LENGTH, dtype=torch.int64)
    launcher.launch(values_kernel, (1,), given, bits, logs, exps, weights, gumbels, LENGTH=LENGTH)
    assert torch.equal(logs, noise.torch_log(given))
    assert torch.equal(exps, noise.torch_exp(-given))
    assert torch.equal(weights, noise.torch_weight(-given))
    assert torch.equal(gumbels, noise.torch_gumbel(bits))


def test_machine_code_of_the_sampler_rounds_as_a_cpu_does(tmp_path: Path) -> None:
    """For sm_80 and sm_90: no product and sum in one rounding, no division but the exact one. Numbers below the normal
    ones may be flushed by floor alone: what it gets is a multiple of 2^-25."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, "80", "90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_GUARD_S)
    assert done.returncode == 0, done.stderr
    ptx = done.stdout
    assert {"sm_80", "sm_90a"} <= set(re.findall(r"\.target (\w+)", ptx))
    assert ptx.count(".visible .entry") == 2 * 11
    assert set(re.findall(r"\bdiv\.\S*f32\S*", ptx)) == {"div.rn.f32"}
    assert not re.findall(r"\b(?:fma|mad)\.\S*f(?:16|32|64)", ptx)
    assert not re.findall(r"\.approx\b|\bex2\b|\blg2\b", ptx)
    assert set(re.findall(r"\S*\.ftz\S*", ptx)) == {"cvt.rmi.ftz.f32.f32"}
