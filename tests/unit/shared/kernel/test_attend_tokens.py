"""Our kernels for a CPU in the library's layers, with windows, sinks and softcaps: beside the textbook in float64, and
the same bits however a row is cut up."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.kernel.code.jit import kernel, tanh32
from shared.kernel.team.team import Team
from shared.model.library.attend import attention, compiled_attention
from shared.model.library.attend.attention import PagedAttention
from shared.model.library.attend.compiled_attention import CompiledAttention, kernels_know
from shared.model.library.attend.layer_places import LayerShape
from tests.support.kernels.library_steps import (
    LAYERS,
    PLAIN,
    STEPS,
    DrawnStep,
    attended,
    attended_once,
    by_hand,
    empty_pool,
    inputs_of,
)

HALF = torch.bfloat16
SHAPES = {
    "softcap": replace(PLAIN, window=9),
    "sinks": replace(PLAIN, window=9),
    "softcap, sinks, wide keys": LayerShape(2, 64, 32, HALF),
    "sinks, unread": replace(PLAIN, window=9, num_unread=3),
    "softcap, sinks, unread, wide keys": LayerShape(2, 64, 32, HALF, num_unread=18),
}
CASES = [(name, "auto") for name in SHAPES] + [("sinks", "int8"), ("softcap", "fp8")]


def ours(layer: LayerShape, kv: str = "auto", threads: int = 1) -> PagedAttention:
    has_window = bool(layer.window or layer.num_unread)
    return PagedAttention([layer], kv, compiled=CompiledAttention(Team(threads), has_window))


@pytest.mark.parametrize(("name", "kv"), CASES)
@pytest.mark.parametrize("step", STEPS)
def test_terms_equal_the_textbook(name: str, kv: str, step: str) -> None:
    layer = SHAPES[name]
    got = attended(ours(layer, kv), name, STEPS[step], kv, exact=False)
    wanted = by_hand(got, layer, name, STEPS[step], kv)
    assert got.out.dtype == layer.dtype
    near = {"atol": 0.03, "rtol": 0.03} if layer.dtype == HALF else {"atol": 3e-6, "rtol": 3e-6}
    torch.testing.assert_close(got.out.double(), wanted, **near)


@pytest.mark.parametrize(("name", "kv"), [("sinks", "auto"), ("softcap", "fp8"), ("sinks, unread", "auto")])
def test_torch_and_kernels_share_pages(name: str, kv: str) -> None:
    """A node where torch attends pairs with one where kernels do."""
    layer, step = SHAPES[name], STEPS["chunks and decode"]
    plain = attended(PagedAttention([layer], kv), name, step, kv, exact=True).out
    torch.testing.assert_close(attended(ours(layer, kv), name, step, kv, exact=True).out, plain, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_a_token_has_the_same_bits_alone(name: str) -> None:
    """And with any number of threads."""
    layer, chunk = SHAPES[name], DrawnStep(((0, 45),))
    whole = attended(ours(layer, threads=2), name, chunk, "auto", exact=True)
    ((_, qkv),) = whole.given
    own, pool = ours(layer), empty_pool(layer, 1, "auto")
    for token in range(45):
        inputs = inputs_of(DrawnStep(((token, 1),)), random.Random(1), exact=True)
        alone = attended_once(own, pool, inputs, tuple(one[token : token + 1] for one in qkv), name)
        assert torch.equal(alone[0], whole.out[token]), f"token {token}"
    pool.close()


def test_tanh_has_few_wrong_digits() -> None:
    numbers = np.concatenate([np.logspace(-6, 1.5, 4000), np.linspace(0.28, 0.32, 1000)]).astype(np.float32)
    got = every_tanh(np.concatenate([numbers, -numbers]))
    right = np.tanh(np.concatenate([numbers, -numbers]).astype(np.float64))
    assert np.abs(got / right - 1).max() < 4 * np.finfo(np.float32).eps
    assert every_tanh(np.array([0.0, 1e30, -1e30], np.float32)).tolist() == [0.0, 1.0, -1.0]


@kernel()
def every_tanh(numbers):  # type: ignore[no-untyped-def]  # numba's
    out = np.empty_like(numbers)
    for n in range(len(numbers)):
        out[n] = tanh32(numbers[n])
    return out


def test_what_kernels_lack_is_left_to_torch() -> None:
    assert kernels_know([LAYERS["plain"], LAYERS["window"], SHAPES["softcap, sinks, wide keys"]])
    for lacking in (replace(PLAIN, key_size=18, value_size=18), LAYERS["narrow values"], LAYERS["latents"]):
        assert not kernels_know([PLAIN, lacking])
    assert PagedAttention([PLAIN]).needs_cpu_seq_lens and not ours(PLAIN).needs_cpu_seq_lens


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("amx", [True, False])
def test_amx_takes_chunks_of_plain_layers(dtype: torch.dtype, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds the rows by arrays, because the host knows only bounds; and our kernels decode what it wrote."""
    monkeypatch.setattr(compiled_attention, "has_amx", lambda: amx)
    asked: list[int] = []
    plain = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *given: asked.append(1) or plain(*given))
    layer = replace(PLAIN, dtype=dtype, window=9)
    got = attended(ours(layer), "window", STEPS["chunks and decode"], "auto", exact=False)
    assert bool(asked) is (amx and dtype == HALF)
    near = 0.03 if dtype == HALF else 3e-6
    wanted = by_hand(got, layer, "window", STEPS["chunks and decode"], "auto")
    torch.testing.assert_close(got.out.double(), wanted, atol=near, rtol=near)
    asked.clear()
    after = attended(ours(layer), "window", STEPS["decode"], "auto", exact=False)
    wanted = by_hand(after, layer, "window", STEPS["decode"], "auto")
    torch.testing.assert_close(after.out.double(), wanted, atol=near, rtol=near)
