"""Products of fp8 rows (--weight-dtype fp8-dynamic): the definition, what GPUs demand of them, and whole streams."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shared.core.errors import ConfigError
from shared.kernel.code.quantized import DTYPES, dequantize, quantize
from shared.kernel.product import scaled_product
from shared.kernel.product.scaled_product import ScaledLinear
from shared.kernel.team.team import Team
from shared.model.formats.opened import HASH_ENDS
from shared.model.math.kernels import Formats, pick_kernels
from tests.support.cores.core_rig import assert_whole, run_local
from tests.support.gpus.cuda_core import KINDS, make_core
from tests.support.gpus.cuda_jobs import jobs_for
from tests.support.gpus.gpu_counts import llama
from tests.support.virtual_gpu.device import make_device

CPU = torch.device("cpu")
BY_ROWS = Formats(weights=scaled_product.NAME)


def defined(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In float64, of the numbers that bytes and scales stand for."""
    wide = (dequantize(*quantize(one, DTYPES["fp8"])).double() for one in (x, weight))
    rows, columns = wide
    return rows @ columns.T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 16, 16), (5, 64, 48), (300, 128, 16)])
def test_products_are_those_of_rounded_rows(rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    """As exact as bfloat16 is. Rows of other sizes, rows of zeros, and inputs that x's largest number hides."""
    torch.manual_seed(rows)
    x = (torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]).bfloat16()
    x[0, 3], weight = 400.0, torch.randn(outputs, inputs).bfloat16()
    weight[2] = 0
    bias = torch.randn(outputs).bfloat16() if has_bias else None
    want, got = defined(x, weight, bias), ScaledLinear(weight, bias)(x)
    assert got.dtype == torch.bfloat16 and got.shape == (rows, outputs)
    size = want.abs().amax(1, keepdim=True)
    assert ((got.double() - want).abs() <= size * 2**-7).all()
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert not torch.equal(want, exact), "x is rounded, and the weight"


def test_no_rows_give_no_rows() -> None:
    assert ScaledLinear(torch.ones(32, 16).bfloat16())(torch.ones(0, 16).bfloat16()).shape == (0, 32)


def test_strides_are_those_that_a_gpu_demands() -> None:
    """The check on "meta" is the GPU's: the weight's columns lie together, scales are float32, one per row."""
    linear = ScaledLinear(torch.empty(32, 64, dtype=torch.bfloat16, device="meta"))
    assert linear(torch.empty(3, 64, dtype=torch.bfloat16, device="meta")).shape == (3, 32)
    assert linear._columns.stride() == (1, 64) and linear._scale.shape == (1, 32)


@pytest.mark.parametrize("shape", [(32, 24), (24, 32)])
def test_other_sizes_are_refused_by_name(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=f"fp8-dynamic: a weight has {shape[0]} x {shape[1]} .* multiples of 16"):
        ScaledLinear(torch.ones(shape))


def test_where_no_gpu_multiplies_fp8_the_flag_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = llama(1)
    for asked in ("auto", "separate"):
        with pytest.raises(ConfigError, match="fp8-dynamic is for GPUs: take auto, int8 or fp8 on a CPU"):
            pick_kernels(config, torch.float32, CPU, Team(1), asked, BY_ROWS)
    with pytest.raises(ConfigError, match="fp8-dynamic needs --dtype bfloat16"):
        pick_kernels(config, torch.float32, torch.device("cuda"), Team(1), "auto", BY_ROWS)

    def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on\nsome GPUs")

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuses)
    with pytest.raises(ConfigError, match="can't multiply fp8 .* only supported on; take auto or fp8"):
        pick_kernels(config, torch.float32, CPU, Team(1), "torch", BY_ROWS)


def test_nodes_with_other_numerics_do_not_pair() -> None:
    """The weights' bytes may be equal: the rows' are not."""
    assert len(set(HASH_ENDS.values())) == len(HASH_ENDS) and scaled_product.NAME in HASH_ENDS


def test_streams_with_graphs_are_those_of_a_plain_core() -> None:
    """On the virtual GPU: no wait of the host, and graphs replay what they captured."""
    kind = replace(KINDS["plain"], weights=scaled_product.NAME)
    asked, gpu = jobs_for(kind, (), 4), make_device("eager")
    plain = make_core(kind)
    expected = run_local(plain, asked, rng=random.Random(1)).streams
    plain.close()
    core = make_core(kind, gpu, graphs=True)
    with gpu.counting() as counts:
        outcome = run_local(core, asked, retract_every=9, rng=random.Random(1))
    assert_whole(core)
    core.close()
    assert outcome.streams == expected and core.graphs is not None and core.graphs.graphed > 3
    assert (counts.syncs, counts.h2d_pageable) == (0, 0), counts.told()
