"""The library's attention where the host knows only bounds of lengths, on torch and on our kernels: the results of the
attention that knows them, in steps of every kind."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.kernel.attention import AttentionInputs
from shared.kernel.step_layout import HostLengths, Layout
from shared.kv.pool import KVPool
from shared.model.library.attention import PagedAttention
from shared.model.library.device_attention import DeviceAttention
from shared.model.library.layer_places import LatentHeads, LayerShape, places_of
from shared.model.library.model import LibraryModel
from tests.support.draft_trees import depths, draw_parents, visible_bits
from tests.support.library_families import load, save

interpreter = pytest.importorskip("tests.support.interpreter", exc_type=ImportError)
kernel_attention = pytest.importorskip("shared.model.library.kernel_attention")

PAGE, PAGES_OF_ROW, HEADS = 4, 30, 4
SPARE = 23  # tokens by which the host's bound exceeds the longest row
PLAIN = LayerShape(2, 16, 16, torch.float32)


@dataclass(frozen=True)
class DrawnStep:
    """Rows of (tokens before, tokens); `trees`: each row's tokens are a draft tree; `running`: rows that decode."""

    rows: tuple[tuple[int, int], ...]
    trees: bool = False
    running: int = 0


STEPS = {
    "decode": DrawnStep(((0, 1), (7, 1), (64, 1), (21, 1)), running=4),
    "verify": DrawnStep(((5, 4), (40, 4), (0, 4)), running=3),
    "trees": DrawnStep(((5, 7), (40, 7)), trees=True, running=2),
    "chunks and decode": DrawnStep(((0, 19), (9, 3), (30, 1), (4, 1)), running=2),
}
LAYERS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=6),
    "shared keys": replace(PLAIN, num_kv_heads=1, window=20),
    "softcap": PLAIN,
    "sinks, window": replace(PLAIN, window=9),
    "sinks, softcap": replace(PLAIN, num_kv_heads=1),
    "narrow values": replace(PLAIN, value_size=8),
    "latents": LayerShape(1, 24, 8, torch.float32, latent=LatentHeads(HEADS, 12, 10)),
}


class LayerAttention(torch.nn.Module):
    """What attention reads of a layer's module."""

    def __init__(self, layer: LayerShape) -> None:
        super().__init__()
        self.layer_idx = 0
        if layer.latent is not None:
            made = layer.latent.num * (layer.latent.key_size + layer.latent.value_size)
            torch.manual_seed(5)
            self.kv_b_proj = torch.nn.Linear(layer.key_size, made, bias=False)


def arguments_of(name: str) -> dict[str, Any]:
    """What a layer of this name gives attention beside queries, keys and values."""
    more: dict[str, Any] = {"scaling": 0.31}
    if name.endswith("softcap"):
        more["softcap"] = 1.5
    if name.startswith("sinks"):
        more["s_aux"] = torch.tensor([-2.0, 0.5, 3.0, 100.0])
    return more


def inputs_of(step: DrawnStep, rng: random.Random, *, exact: bool) -> AttentionInputs:
    lens, befores = [num for _, num in step.rows], [before for before, _ in step.rows]
    bounds = np.cumsum([0, *lens]).astype(np.int32)
    table = 1 + torch.randperm(len(lens) * PAGES_OF_ROW, generator=torch.Generator().manual_seed(4)).int()
    parents = [draw_parents(rng, num) if step.trees else list(range(num - 1)) for num in lens]
    slots = torch.cat([before + torch.arange(num) for before, num in step.rows])
    longest = max(map(sum, step.rows))
    return AttentionInputs(
        torch.cat([before + torch.tensor(depths(of)) for before, of in zip(befores, parents, strict=True)]),
        Layout(
            torch.from_numpy(bounds), (table.view(len(lens), PAGES_OF_ROW),), max(lens), longest + SPARE * (not exact),
            host=HostLengths(bounds, np.asarray(befores) if exact else None, step.running),
        ),
        slots if step.trees else None,
        torch.cat([visible_bits(of) for of in parents]) if step.trees else None,
    )  # fmt: skip


def attended(own: PagedAttention, name: str, step: DrawnStep, kv: str, *, exact: bool) -> torch.Tensor:
    """Return the results of a pool in which nothing but what rows may read is a number."""
    layer = LAYERS[name]
    planes = places_of([layer]).specs(PAGE, kv)
    pool = KVPool(planes, 1 + len(step.rows) * PAGES_OF_ROW, PAGE)
    draw = torch.Generator().manual_seed(7)
    for plane in planes:
        numbers = pool.plane(plane.name)
        numbers.fill_(float("nan") if numbers.dtype.is_floating_point else 0)
    module = LayerAttention(layer)
    query_size = layer.key_size if layer.latent is None else layer.latent.key_size + layer.value_size
    results = []
    before = DrawnStep(tuple((0, start) for start, _ in step.rows if start))
    written = replace_table(inputs_of(before, random.Random(1), exact=exact), step)
    for inputs in (written, inputs_of(step, random.Random(1), exact=exact)):
        own.begin(inputs, pool)
        num = len(inputs.positions)
        q, k, v = (
            torch.randn(1, heads, num, size, generator=draw)
            for heads, size in (
                (HEADS, query_size), (layer.num_kv_heads, layer.key_size), (layer.num_kv_heads, layer.value_size)
            )
        )  # fmt: skip
        results.append(own(module, q, k, v, None, **arguments_of(name))[0].detach())
    pool.close()
    return results[-1][0]


def replace_table(inputs: AttentionInputs, step: DrawnStep) -> AttentionInputs:
    """Give the rows that have tokens before the step the pages that they have in it."""
    (table,) = inputs_of(step, random.Random(1), exact=True).layout.page_tables
    own = table[[number for number, (start, _) in enumerate(step.rows) if start]]
    return replace(inputs, layout=replace(inputs.layout, page_tables=(own,)))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", LAYERS)
def test_bounds_of_lengths_change_no_result(name: str, step: str) -> None:
    layers = [LAYERS[name]]
    wanted = attended(PagedAttention(layers), name, STEPS[step], "auto", exact=True)
    got = attended(DeviceAttention(layers, use_kernels=False), name, STEPS[step], "auto", exact=False)
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "step", "kv"),
    [
        ("plain", "decode", "auto"), ("window", "verify", "auto"), ("window", "trees", "auto"),
        ("shared keys", "chunks and decode", "auto"), ("plain", "chunks and decode", "int8"),
        ("window", "trees", "fp8"), ("softcap", "decode", "auto"), ("softcap", "trees", "int8"),
        ("sinks, window", "trees", "auto"), ("sinks, window", "chunks and decode", "auto"),
        ("sinks, softcap", "decode", "auto"), ("sinks, softcap", "chunks and decode", "fp8"),
    ],
)  # fmt: skip
def test_our_kernels_read_the_library_s_pages(name: str, step: str, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [LAYERS[name]]
    own = DeviceAttention(layers, kv, use_kernels=True)
    assert not own.gathers
    wanted = attended(PagedAttention(layers, kv), name, STEPS[step], kv, exact=True)
    for split_keys in (16, 256) if name.startswith("sinks") else (16,):  # of one split there is no merge
        monkeypatch.setattr(interpreter.kernels("paged_attention"), "SPLIT_KEYS", split_keys)
        got = attended(own, name, STEPS[step], kv, exact=False)
        torch.testing.assert_close(got, wanted, atol=2e-5 if kv == "auto" else 2e-4, rtol=2e-5)


def test_what_kernels_lack_is_left_to_torch() -> None:
    known = {name for name, layer in LAYERS.items() if kernel_attention.kernels_know(layer)}
    assert known == LAYERS.keys() - {"narrow values", "latents"}
    assert not kernel_attention.kernels_know(replace(PLAIN, key_size=512, value_size=512))
    assert not kernel_attention.kernels_know(replace(LAYERS["latents"], value_size=24))
    assert DeviceAttention([PLAIN, LAYERS["narrow values"]], use_kernels=True).gathers
    assert DeviceAttention([PLAIN], use_kernels=False).gathers


@pytest.mark.parametrize(("family", "gathers"), [("deepseek_v2", True), ("gemma2", False), ("llama", False)])
def test_a_model_says_whether_it_gathers(family: str, gathers: bool, tmp_path: Path) -> None:
    """The kernels are interpreted, also in the check at load."""
    save(family, tmp_path, num_hidden_layers=2)
    model = load(tmp_path, kernels="triton")
    assert isinstance(model, LibraryModel) and model.gathers is gathers
    assert not model.spec.needs_cpu_seq_lens
