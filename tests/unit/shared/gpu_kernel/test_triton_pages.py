"""What Triton's kernels write to pages and read from them: the reference's bits, at any address."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from shared.kernel.attention.attention import AttentionShape, TorchAttention
from shared.kernel.code.quantized import DTYPES
from tests.support.kernels.paged_steps import LAYER, Row, Step, make_step, tables_of

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
attention = interpreter.kernels("attention")
paged = interpreter.kernels("paged_attention")

HARD = (0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -126.5, 127.0, 447.0, 432.0, 440.0, 2.0**-6, 2.0**-9, 3 * 2.0**-10, 1e-8)


@pytest.mark.parametrize("pages", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_and_scales_are_the_reference_s(pages: str, dtype: torch.dtype) -> None:
    """Halves between two bytes, what is smaller than any, zeros, and rows of huge and tiny numbers."""
    shape = AttentionShape(2, 2, 64, 1e-5)
    step = make_step(shape, [Row(0, 12)], dtype=dtype, pages=pages)
    hard = torch.tensor(HARD).repeat(4)
    values = step.qkv.view(12, 6, 64)
    for token, factor in enumerate((1.0, 0.0, 1e-3, 100.0, 2.0**-24, 1.0, 1.0, 1.0)):
        values[token, 4] = (hard * factor).to(dtype)
        values[token, 2] = (torch.linspace(-1, 1, 64) * factor).to(dtype)
    for token in range(12):  # the largest one is a byte: all others are as they stand
        values[token, 5] = (torch.arange(64) * 7.0 + token * 0.5).to(dtype)
        values[token, 5, 0] = {"int8": 127.0, "fp8": 448.0}[pages]
        values[token, 5, 1:] %= values[token, 5, 0]
    step.run(TorchAttention(shape, tables_of(shape)))
    wanted, scales = step.pages()
    step.run(attention.TritonAttention(shape, tables_of(shape)))
    assert torch.equal(step.pages()[0], wanted)
    torch.testing.assert_close(step.pages()[1], scales, rtol=0, atol=0, equal_nan=True)


PAGES_BEFORE = 1 << 20  # of 2,048 bytes each: the pages in use begin behind 2**31
CHECKED = interpreter.grids.InterpreterOptions(debug=True, sanitize_overflow=True)
NO_RESERVE = 0x4000  # linux/mman.h


def far_away(step: Step) -> Step:
    """The same with a pool so large that no 32 bits count its bytes, of which only the pages in use are memory."""
    assert step.kv[0].numel() == 3 * 2048 and step.scales is not None
    pages = PAGES_BEFORE + len(step.kv)
    kv = sparse(pages * 2048, torch.int8).view(pages, 1, *step.kv.shape[2:])
    scales = sparse(pages * 32, torch.float32).view(pages, 1, *step.scales.shape[2:])
    kv[PAGES_BEFORE:], scales[PAGES_BEFORE:] = step.kv[:, LAYER, None], step.scales[:, LAYER, None]
    layout = replace(step.inputs.layout, page_tables=(step.inputs.layout.page_table + PAGES_BEFORE,))
    return replace(step, kv=kv, scales=scales, inputs=replace(step.inputs, layout=layout))


def sparse(num: int, dtype: torch.dtype) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, num * dtype.itemsize, flags=flags), dtype=dtype)


@pytest.mark.parametrize("rows", [[Row(70, 1), Row(9, 1)], [Row(20, 18)]], ids=["windows", "chunk"])
def test_a_pool_beyond_32_bits(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter refuses a sum or product of 32 bits that has more."""
    monkeypatch.setattr(paged, "SPLIT_KEYS", 64)
    monkeypatch.setattr(interpreter.grids.interpreter_builder, "options", CHECKED)
    # Else it copies the pool to itself at the end of a launch.
    monkeypatch.setattr(interpreter.grids.GridExecutor, "_restore_args_dev", lambda *_: None)
    shape = AttentionShape(2, 1, 64, 1e-5)
    near = make_step(shape, rows, pages="int8")
    far = far_away(near)
    ours = attention.TritonAttention(shape, tables_of(shape))
    wanted = near.run(ours)
    ours.begin(far.inputs, far.kv, far.scales)
    try:
        got = ours.attend(0, far.qkv, None, None)
    except interpreter.grids.InterpreterError as error:
        pytest.fail(str(error))
    assert torch.equal(got, wanted)
    assert torch.equal(far.kv[PAGES_BEFORE:, 0], near.kv_after[:, LAYER])
