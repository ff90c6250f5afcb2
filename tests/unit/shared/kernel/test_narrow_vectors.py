"""Older processors: kernels compiled for them keep every promise about bits, and have this machine's bits."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch

from shared.kernel.attention.attention_numba import make_write
from shared.kernel.attention.rope import inverse_frequencies
from shared.kernel.code.items import Items
from shared.kernel.product.blocks_numba import make_gate, make_norm, make_rows_norm
from shared.kernel.product.product import TileLinear, has_wide_vectors, pack
from shared.kernel.team.team import Team
from shared.model.formats.opened import LoadOptions
from shared.model.library.attend.attention import PagedAttention
from shared.model.library.attend.compiled_attention import CompiledAttention
from shared.model.library.attend.layer_places import LayerShape
from shared.model.loading.load import load_model
from shared.model.math.kernels import Formats
from tests.support.kernels import library_steps
from tests.support.kernels.paged_attention import SHAPES as HEADS
from tests.support.kernels.paged_attention import Paged, numba_backend
from tests.support.machine.processors import run_python
from tests.support.models.tiny_families import save
from tests.support.models.tiny_models import VOCAB, Rows

SHAPES = ((130, 96, 7), (64, 64, 1), (100, 32, 2), (70, 34, 12), (200, 512, 13))  # columns, inputs, rows
# A test of each kind whose results depend on how sums are split into vectors.
PROMISES = (
    "tests/unit/shared/kernel/test_kernel_sums.py::test_a_sum_has_the_bits_of_its_definition[31]",
    "tests/unit/shared/kernel/test_kernel_attention.py::test_a_run_of_tokens_has_the_bits_of_each_alone[gqa-float32]",
    "tests/unit/shared/kernel/test_kernel_attention.py::test_a_run_of_tokens_has_the_bits_of_each_alone[gqa-bfloat16]",
    "tests/unit/shared/kernel/test_kernel_byte_pages.py::test_a_run_over_bytes_has_the_bits_of_each_token_alone[gqa-int8]",
    "tests/unit/shared/kernel/test_attend_bytes.py::test_equals_the_definition[64]",
)
TREES = "tests/unit/shared/kernel/test_kernel_tree.py::test_every_node_is_its_path_run_as_a_chain[2-3-numba-16]"


def digest(numbers: torch.Tensor) -> str:
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()


def products() -> str:
    """Return whether vectors are wide, then a digest of each product."""
    draw, found = torch.Generator().manual_seed(3), [str(has_wide_vectors())]
    for dtype in (torch.float32, torch.bfloat16):
        for columns, inputs, rows in SHAPES:
            weight = torch.randn(columns, inputs, generator=draw) * torch.logspace(-3, 3, columns)[:, None]
            x, bias = torch.randn(rows, inputs, generator=draw), torch.randn(columns, generator=draw)
            found.append(digest(TileLinear(pack(weight.to(dtype), bias), Team(1), torch.float32)(x.to(dtype))))
    return " ".join(found)


def logits(folder: str, dtype: str, formats: Formats) -> str:
    """Return digests of the logits of a prompt and of a step of two rows."""
    model = load_model(folder, LoadOptions(dtype, formats=formats))
    rows = Rows(model, 2, page_size=4, max_len=100)
    prompt = [number * 7 % VOCAB for number in range(77)]
    return " ".join(digest(rows.step(step).float()) for step in ({0: prompt}, {0: [5], 1: prompt[:20]}))


def divisions() -> str:
    """Return the instructions for quotients and roots in the tasks that divide."""
    norms = make_norm(64, 1e-6, False), make_rows_norm(64, 1e-6, False)
    tasks = (*norms, make_write(6, 2, 64, False, Items.FLOATS, 1e-6), make_gate(64, False))
    code = "".join(task._library.get_asm_str() for task in tasks)
    return " ".join(sorted(set(re.findall(r"\bv?(?:r?sqrt|rcp|div)\d*[sp]s\b", code))))


@pytest.mark.parametrize("processor", ["haswell", pytest.param("skylake-avx512", marks=pytest.mark.long)])
def test_no_quotient_or_root_is_approximated(processor: str, tmp_path: Path) -> None:
    """Approximations (`vrsqrtss`, `vrcpps`) have other bits on processors of another manufacturer."""
    code = "from tests.unit.shared.kernel.test_narrow_vectors import divisions; print(divisions())"
    there = run_python(processor, tmp_path, "-c", code)
    assert there.stdout.split() == ["vdivps", "vdivss", "vsqrtss"], there.stderr


@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512"])
def test_products_have_the_same_bits(processor: str, tmp_path: Path) -> None:
    code = "from tests.unit.shared.kernel.test_narrow_vectors import products; print(products())"
    there = run_python(processor, tmp_path, "-c", code)
    assert there.stdout.split() == [str("avx512" in processor), *products().split()[1:]], there.stderr


def attended() -> str:
    """Return digests of a prompt and two decode steps.

    bfloat16 results hide the order of sums. So a pair of each score nearly cancels out, and so do the values of the
    decode steps, which weigh the same."""
    shape, dtype = HEADS["one kv head, odd group"], torch.bfloat16
    paged = Paged(numba_backend(shape, dtype), shape, dtype=dtype)
    heads = paged.qkv.unflatten(2, (-1, shape.head_dim))
    q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=2)
    q[..., 62:], k[..., 62], k[..., 63] = 64.0, 64.0, -64.0
    q[:, 76:] = 0.0
    v[:, :38] *= 2.0 ** (torch.arange(38) * 7 % 24)[:, None, None]
    v[:, 38:76] = -v[:, :38]
    return " ".join(digest(paged.step({0: span}).float()) for span in ((0, 76), (76, 77), (77, 78)))


@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512"])
def test_pairs_of_attention_have_the_same_bits(processor: str, tmp_path: Path) -> None:
    code = "from tests.unit.shared.kernel.test_narrow_vectors import attended; print(attended())"
    there = run_python(processor, tmp_path, "-c", code)
    assert there.stdout.split() == attended().split(), there.stderr


def softened() -> str:
    """Return digests of attention with sinks and softcaps in layers of the library."""
    layer, step = LayerShape(2, 16, 16, torch.float32, 9), library_steps.STEPS["chunks and decode"]
    own = PagedAttention([layer], "auto", compiled=CompiledAttention(Team(1), has_window=True))
    found = (library_steps.attended(own, name, step, "auto", exact=True) for name in ("softcap", "sinks"))
    return " ".join(digest(one.out) for one in found)


@pytest.mark.long
@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512"])
def test_sinks_and_softcaps_have_the_same_bits(processor: str, tmp_path: Path) -> None:
    code = "from tests.unit.shared.kernel.test_narrow_vectors import softened; print(softened())"
    there = run_python(processor, tmp_path, "-c", code)
    assert there.stdout.split() == softened().split(), there.stderr


def frequencies() -> str:
    return str([inverse_frequencies(head_dim, theta).tolist() for head_dim, theta in ((104, 1e4), (120, 1e5))])


def test_rotary_frequencies_have_the_same_bits(tmp_path: Path) -> None:
    """torch rounds some powers otherwise in narrow vectors."""
    code = "from tests.unit.shared.kernel.test_narrow_vectors import frequencies; print(frequencies())"
    there = run_python("haswell", tmp_path, "-c", code)
    assert there.stdout.strip() == frequencies(), there.stderr


@pytest.mark.parametrize(
    ("processor", "family", "dtype", "formats"),
    [
        ("haswell", "gemma3", "float32", Formats()),
        pytest.param("haswell", "qwen3", "bfloat16", Formats(kv="int8"), marks=pytest.mark.long),
        pytest.param("haswell", "qwen3", "float32", Formats(weights="fp8"), marks=pytest.mark.long),
        pytest.param("skylake-avx512", "qwen3, large heads", "bfloat16", Formats(), marks=pytest.mark.long),
    ],
    ids=["float32", "bfloat16, int8 KV", "fp8 weights", "bfloat16 without pair products"],
)
def test_a_whole_model_has_the_same_bits(
    processor: str, family: str, dtype: str, formats: Formats, tmp_path: Path
) -> None:
    """So a stream may go on where processors are of another kind."""
    save(family, tmp_path / "model")
    asked = f"{str(tmp_path / 'model')!r}, {dtype!r}, Formats{(formats.kv, formats.weights)}"
    code = f"from tests.unit.shared.kernel.test_narrow_vectors import *; print(logits({asked}))"
    there = run_python(processor, tmp_path / "cache", "-c", code)
    assert there.stdout.split() == logits(str(tmp_path / "model"), dtype, formats).split(), there.stderr


@pytest.mark.parametrize(
    "promise",
    [*PROMISES, pytest.param(TREES, marks=pytest.mark.long)],
    ids=["sums", "attention", "pairs", "bytes", "integers", "trees"],
)
def test_what_wide_vectors_promise_holds_here(promise: str, tmp_path: Path) -> None:
    there = run_python("haswell", tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", promise)
    assert there.returncode == 0 and "1 passed" in there.stdout, there.stdout
