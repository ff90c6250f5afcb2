"""Models whose layers are those of the library transformers. Their streams through our engine, with chunks, caches,
hand-offs, retractions and drafts, are the library's own. What the check refuses, and how it says so."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.config.models.model_folder import read_folder
from shared.core import extras
from shared.core.errors import ConfigError
from shared.engine.engine import Engine
from shared.engine.future_map import FutureMap
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kv.layout import page_windows
from shared.kv.pool import KVPool
from shared.model.formats import choice
from shared.model.formats.opened import LibraryFolder, LoadOptions, open_named
from shared.model.library import loading
from shared.model.library.attend import attention, step_rows
from shared.model.library.attend.layer_places import LayerShape
from shared.model.library.check import FEW, CheckResult, paged_logits
from shared.model.library.model import LibraryModel
from shared.model.library.survey import chunk_of, window_of
from shared.model.llama.llama import LlamaModel
from shared.model.loading.load import load_model
from shared.model.math.interface import ModelInputs
from shared.model.math.kernels import Formats
from tests.support.cores.core_rig import Outcome, make_core, run_local
from tests.support.models.library_families import (
    KNOBS,
    PROMPTS,
    Family,
    greedy_jobs,
    load,
    make_family,
    network_of,
    save,
    streams_of,
)
from tests.support.models.tiny_quantized import FORMATS, write_quantised

KERNELS = ("auto", "torch")
BY_TORCH = ("deepseek_v3", "glm_moe_dsa", "llama4_text")
QUICK = ("granite", "gemma2", "gpt_oss", *BY_TORCH)


@pytest.fixture(scope="module", params=QUICK)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family("gpt_oss", tmp_path_factory.mktemp("model") / "gpt_oss")


# Equal to the library's own answers


@pytest.mark.parametrize(("name", "form"), [("deepseek_v3", "fp8, ragged blocks"), ("starcoder2", "GPTQ, act order")])
def test_a_quantised_folder_is_widened_for_the_library(name: str, form: str, tmp_path: Path) -> None:
    plain, quantised, widened = (tmp_path / one for one in ("plain", "quantised", "widened"))
    save(name, plain)
    meant = write_quantised(plain, quantised, form)
    shutil.copytree(plain, widened)
    save_file({one: tensor.float() for one, tensor in meant.items()}, widened / "model.safetensors", {"format": "pt"})
    ours, right = (load(folder) for folder in (quantised, widened))
    assert isinstance(ours, LibraryModel) and isinstance(right, LibraryModel)
    expected = right.network.state_dict()
    assert all(torch.equal(tensor, expected[one]) for one, tensor in ours.network.state_dict().items())
    assert ours.spec.stored is not None and ours.spec.stored.format == FORMATS[form].name


def test_layers_of_one_size_share_a_plane(tmp_path: Path) -> None:
    """Gemma 4's layers differ in their heads."""
    save("gemma4_text", tmp_path / "gemma4")
    gemma = load(tmp_path / "gemma4")
    assert isinstance(gemma, LibraryModel)
    planes = gemma.kv_planes(8)
    assert len(planes) == 2 and page_windows(planes) == (0,), "one page list for both"
    assert sum(plane.shape[0] for plane in planes) == len(gemma.layers)


def test_bfloat16_is_checked_by_its_own_noise(windowed: Family) -> None:
    model = load(windowed.folder, "bfloat16")
    assert isinstance(model, LibraryModel) and model.kv_planes(8)[0].dtype == torch.bfloat16
    assert "4 layers" not in model.report and "2 layers with 2 heads" in model.report


# Drafts, and the lengths that they make unknown


def drafted(model: LibraryModel) -> tuple[Outcome, list[bool]]:
    """Return the outcome, and of each plan whether the host knew only bounds of the lengths."""
    core = make_core(dataclasses.replace(KNOBS, width=4, spec="ngram"), model=model)
    relayed: list[bool] = []
    plan = core.scheduler.planner.plan
    core.scheduler.planner.plan = lambda: noted(plan(), relayed)  # type: ignore[method-assign]
    outcome = run_local(core, greedy_jobs())
    core.close()
    return outcome, relayed


def noted(plan: Any, relayed: list[bool]) -> Any:
    if plan is not None:
        relayed.append(plan.lengths_relayed)
    return plan


@pytest.mark.rule("S6", "I3")
def test_drafted_streams_are_the_library_s(family: Family) -> None:
    """Where torch loops over rows on the host, plans wait for exact lengths, though no knob asks for them."""
    outcome, relayed = drafted(family.model)
    family.assert_said(streams_of(outcome))
    assert relayed and any(relayed) is (family.name not in BY_TORCH)


@pytest.mark.rule("S6")
def test_drafts_without_the_wait_for_lengths_fail(windowed: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch, resolve = load(windowed.folder, kernels="torch"), FutureMap.resolve_seq_lens_cpu
    assert isinstance(by_torch, LibraryModel)
    monkeypatch.setattr(Engine, "newest_publish", lambda engine: None)
    monkeypatch.setattr(FutureMap, "resolve_seq_lens_cpu", lambda own, rows, ready: resolve(own, rows, None))
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        windowed.assert_said(streams_of(drafted(by_torch)[0]))


def step(model: LibraryModel, pool: KVPool, start: int, ids: list[int], **tree: list[int]) -> torch.Tensor:
    """The logits of a row's further tokens. `tree`: positions, slots and visible of a draft tree."""
    bounds, num_groups = np.asarray([0, len(ids)], np.int32), len(page_windows(pool.planes))
    layout = Layout(
        cu_q_lens=torch.from_numpy(bounds),
        page_tables=tuple(torch.tensor([[3, 1, 2]], dtype=torch.int32) + 3 * group for group in range(num_groups)),
        max_q_len=len(ids),
        max_seq_len=start + len(ids),
        host=HostLengths(bounds, np.asarray([start]), 1),
    )
    more = {name: torch.tensor(values) for name, values in tree.items()}
    given = {"positions": torch.arange(start, start + len(ids))} | more
    with torch.inference_mode():
        return model.forward(
            ModelInputs(torch.tensor(ids), layout=layout, logits_idx=torch.arange(len(ids)), **given), pool
        ).logits


def test_positions_past_the_end_do_no_harm(tmp_path: Path) -> None:
    """Steps in flight run past the last token; GPT-2's table of positions ends there."""
    save("gpt2", tmp_path, max_position_embeddings=16)
    model = load(tmp_path)
    assert isinstance(model, LibraryModel)
    prompt = list(PROMPTS[1][:18])
    try:
        whole = step(model, KVPool(model.kv_planes(8), 4, 8), 0, prompt)
    except IndexError:
        pytest.fail("it read behind the table's end")
    torch.testing.assert_close(whole[:16], step(model, KVPool(model.kv_planes(8), 4, 8), 0, prompt[:16]))


def test_a_rank_s_rows_have_the_same_lengths() -> None:
    """--dp cuts a step's rows without the host's numbers."""
    bounds, before = np.asarray([0, 3, 3, 4, 5], np.int32), np.asarray([0, 7, 9, 12])
    table = torch.zeros(4, 2, dtype=torch.int32)
    layout = Layout(torch.from_numpy(bounds), (table,), 3, 13, host=HostLengths(bounds, before, 2))
    inputs = AttentionInputs(torch.tensor([0, 1, 2, 9, 12]), layout)
    of_rank = dataclasses.replace(inputs, layout=dataclasses.replace(layout, host=None))
    rows = step_rows.rows_of(inputs)
    assert [row.lengths for row in rows] == [(3,), (10, 13)]
    assert step_rows.rows_of(of_rank) == rows


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_reads_no_number_behind_its_end(kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows decode together, padded to the longest, in a pool full of NaN.

    The check that would refuse the model, because its pool holds NaN too, is left out."""
    monkeypatch.setattr(loading, "check_logits", lambda network, model, parts: CheckResult(0.0, 0.0))
    save("gpt_oss", tmp_path)
    model = load(tmp_path, kernels=kernels)
    assert isinstance(model, LibraryModel)
    rows = [torch.tensor(PROMPTS[1][:length]) for length in (5, 9, 30)]
    wanted = torch.arange(30)
    clean, poisoned = (paged_logits(model, rows, wanted, poison) for poison in (0.0, float("nan")))
    assert torch.equal(clean, poisoned)


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama4"
    save("llama4_text", folder)
    return folder


@pytest.mark.parametrize(
    ("kernels", "length", "in_chunks"),
    [("auto", 5, False), ("torch", 17, False), ("auto", 17, False), ("torch", 14, True)],
)
def test_drafts_of_a_tree_read_their_own_path(
    windowed: Family, chunked: Path, kernels: str, length: int, in_chunks: bool
) -> None:
    """x and y follow b, and z follows x. A window of 16 counts the path's tokens, not the siblings between. Of chunks
    of 16, z begins another."""
    prompt, model = list(PROMPTS[1][:length]), load(chunked if in_chunks else windowed.folder, kernels=kernels)
    assert isinstance(model, LibraryModel)
    planes = model.kv_planes(8)
    pool = KVPool(planes, 1 + 3 * len(page_windows(planes)), 8)
    step(model, pool, 0, prompt)
    slots = list(range(length, length + 4))
    positions = [length, length + 1, length + 1, length + 2]
    tree = step(model, pool, length, [9, 20, 30, 40], positions=positions, slots=slots, visible=[1, 3, 5, 11])
    for path, nodes in (([9, 20, 40], [0, 1, 3]), ([9, 30], [0, 2])):
        step(model, pool, 0, prompt)
        torch.testing.assert_close(step(model, pool, length, path), tree[nodes])


# What is refused, in one sentence


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("lost", ["sinks", "softcap"])
def test_wrong_attention_is_refused(lost: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("gpt_oss" if lost == "sinks" else "gemma2", tmp_path)
    whole = attention.Scoring
    monkeypatch.setattr(attention, "Scoring", lambda *given: dataclasses.replace(whole(*given), **{lost: None}))
    with pytest.raises(ConfigError, match=r"its logits differ by \d.* the bound is \d"):
        load(tmp_path, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_window_that_reads_one_token_more_is_refused(
    windowed: Family, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_wide_windows(layers: Sequence[LayerShape], *more: Any, **named: Any) -> attention.PagedAttention:
        wide = [dataclasses.replace(layer, window=layer.window and layer.window + 1) for layer in layers]
        return attention.PagedAttention(wide, *more, **named)

    monkeypatch.setattr(loading, "PagedAttention", with_wide_windows)
    with pytest.raises(ConfigError, match="its logits differ"):
        load(windowed.folder, kernels=kernels)


@pytest.mark.parametrize(("error", "is_right"), [(5e-5, True), (1e-2, False)])
def test_what_chunks_alone_round_is_noise_if_little(
    error: float, is_right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library computes steps of one or two tokens in another way, without a cache or with its own."""
    save("granite", tmp_path)
    read = loading.read_network

    def rounding(*args: Any) -> Any:
        network: Any = read(*args)
        network.model.layers[1].mlp.register_forward_hook(lambda _, x, out: out * (1 + error * (out.shape[1] <= FEW)))
        return network

    monkeypatch.setattr(loading, "read_network", rounding)
    try:
        load(tmp_path)
    except ConfigError as refusal:
        assert not is_right and "its logits differ" in refusal.message
    else:
        assert is_right


def test_an_argument_of_attention_that_is_unknown_is_named(windowed: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.model.library.survey.HARMLESS", frozenset())
    with pytest.raises(ConfigError, match="gpt_oss can't be served: layer 0 gives attention .*position_ids"):
        load(windowed.folder)


def test_a_mask_is_a_window_or_nothing_or_neither() -> None:
    def causal(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query

    assert window_of(causal, 64) == 0
    assert window_of(lambda b, h, q, k: causal(b, h, q, k) & (k > q - 16), 64) == 16
    assert window_of(lambda b, h, q, k: causal(b, h, q, k) & (k // 16 == q // 16), 64) is None, "chunks"
    assert window_of(lambda b, h, q, k: k < 64, 64) is None, "both ways"


@pytest.mark.parametrize("context", [33, 48, 50, 64])
def test_the_size_of_chunks_is_read_from_a_mask(context: int) -> None:
    def in_chunks(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (key // 16 == query // 16)

    assert chunk_of(in_chunks, context) == 16
    assert chunk_of(lambda b, h, q, k: in_chunks(b, h, q, k) | ((k == 1) & (q == 16)), context) == 0, "one key more"
    assert chunk_of(lambda b, h, q, k: in_chunks(b, h, q, k) & (k > q - 9), context) == 0, "a window in chunks"
    assert chunk_of(lambda b, h, q, k: k < 64, context) == 0, "both ways"


def test_a_window_that_only_the_mask_has_is_refused(windowed: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.model.library.survey.window_of", lambda mask, context: 7)
    with pytest.raises(ConfigError, match=r"layer 0 asks for a window of 16 \(0: none\), but its mask has another"):
        load(windowed.folder)


def test_missing_tensors_are_not_made_up(tmp_path: Path) -> None:
    save("granite", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks tensors: model\.layers\.2\.mlp\.up_proj\.weight"):
        load(tmp_path)


def with_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text("utf-8")) | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    save("granite", tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    with_config(tmp_path, model_type="mine", architectures=["Mine"], auto_map={"AutoConfig": "mine.Mine"})
    with pytest.raises(ConfigError, match="can't read its config.json"):
        load(tmp_path)


def test_numbers_without_their_scales_are_refused(tmp_path: Path) -> None:
    """Some tools name the scheme in another file. The library would take the bytes for the weights."""
    save("granite", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"tensor {name} is F8_E4M3, and config\.json has no scheme"):
        load(tmp_path)


def test_tensors_come_from_the_files_that_are_hashed(tmp_path: Path) -> None:
    """Neither an index nor config.json leads the library to other files."""
    save("granite", tmp_path / "a")
    before = load(tmp_path / "a")
    other = network_of("granite")
    with torch.no_grad():
        other.get_output_embeddings().weight.zero_()
    other.save_pretrained(tmp_path / "b")
    where = dict.fromkeys(other.state_dict(), "../b/model.safetensors")
    (tmp_path / "a/model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    with_config(tmp_path / "a", transformers_weights="adapter_model.bin")
    after = load(tmp_path / "a")
    assert isinstance(before, LibraryModel) and isinstance(after, LibraryModel)
    own = after.network.state_dict()
    assert all(torch.equal(tensor, own[one]) for one, tensor in before.network.state_dict().items())


@pytest.mark.parametrize("change", [{"hidden_size": "64"}, {"vocab_size": None}, {"rope_parameters": "x"}])
def test_a_wrong_config_is_one_sentence(change: dict[str, Any], tmp_path: Path) -> None:
    save("granite", tmp_path)
    with_config(tmp_path, **change)
    with pytest.raises(ConfigError, match="can't read its config.json"):
        load(tmp_path)


def test_long_prompts_attend_in_parts(windowed: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of a chunk that don't fit are computed some queries at a time."""
    rows = [torch.arange(3, 60), torch.arange(3, 40)]
    wanted, by_torch = torch.arange(36), load(windowed.folder, kernels="torch")
    assert isinstance(by_torch, LibraryModel)
    whole = paged_logits(by_torch, rows, wanted)
    monkeypatch.setattr("shared.model.library.attend.attention.MOST_NUMBERS", 400)
    assert torch.allclose(paged_logits(by_torch, rows, wanted), whole, atol=1e-5)


@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("--lora", {"adapters": {"a": "/there"}}),
        ("--lora-dir", {"lora_slots": 8}),
        ("--weight-dtype", {"formats": Formats(weights="int8")}),
        ("--deterministic", {"kernels": "fixed"}),
    ],
)
def test_flags_that_it_lacks_are_refused(flag: str, options: dict[str, Any], windowed: Family) -> None:
    with pytest.raises(ConfigError, match=rf"{flag}: models that the library transformers runs \(gpt_oss\) "):
        load(windowed.folder, **options)


# Who runs which model


def test_auto_keeps_our_own_families(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    assert isinstance(load_model(str(tmp_path), LoadOptions("float32", kernels="torch")), LlamaModel)
    assert isinstance(load(tmp_path), LibraryModel)


def test_ours_alone_refuses_other_families(windowed: Family) -> None:
    with pytest.raises(ConfigError, match="architecture 'GptOssForCausalLM' is not supported, only "):
        load_model(str(windowed.folder), LoadOptions("float32", library="baton"))


def test_a_gguf_file_is_not_for_the_library() -> None:
    with pytest.raises(ConfigError, match="--model-library transformers reads folders with"):
        open_named("smollm2", LoadOptions("float32", library="transformers"))


def test_without_the_library_one_sentence_has_the_line(windowed: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_named(str(windowed.folder), LoadOptions()) == LibraryFolder(windowed.folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as found:
        choice.uses_library(read_folder(windowed.folder), "auto")
    line = extras.install_line("models")
    assert found.value.message == (
        f"architecture GptOssForCausalLM needs the package transformers; to install it, type: {line}"
    )
