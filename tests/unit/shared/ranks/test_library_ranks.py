"""Models of the library transformers on several ranks, by the library's own plan: their streams are its `generate`'s.

Ranks are threads here; test_library_cluster.py has processes.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter

from shared.core.errors import ConfigError
from shared.device.group import RankGroup
from shared.kernel.code.step_layout import Layout
from shared.kv.layout import page_windows
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.formats.quantized_folder import open_tensors
from shared.model.library import plan
from shared.model.library.model import LibraryModel
from shared.model.library.plan import COLUMNS, ROWS, PartStyle, TensorCut
from shared.model.loading.shard import load_shard
from shared.model.math.interface import LayerMarks, Model, ModelInputs
from shared.transfer.interface import Part
from tests.support.cores.core_rig import CoreKnobs
from tests.support.cores.tp_rig import Load, followers, load_in_turn, pair_streams, streams_of
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.library_families import (
    FAMILIES,
    LONGROPE,
    NUM_TOKENS,
    PROMPTS,
    Said,
    generate,
    greedy_jobs,
    load,
    network_of,
    save,
)
from tests.support.models.library_wrappers import WRAPPERS, save_wrapper
from tests.support.models.tiny_quantized import write_quantised

PROBED = (
    *("deepseek_v2", "deepseek_v3", "gemma3_text", "glm4_moe", "glm_moe_dsa", "gpt_oss", "llama", "qwen3", "qwen3_moe"),
    "qwen3_vl",
)
NO_PLAN = (
    *("biogpt", "bitnet", "ctrl", "gpt2", "gpt_bigcode", "jetmoe", "modernbert-decoder", "opt", "persimmon"),
    "stablelm",
)
OTHER_STYLES = {
    "aria_text": "packed_rowwise",
    **dict.fromkeys(("beam", "granite_swa", "granitemoe_swa"), "local_params"),
}
SPLIT = "sarvam_moe"  # its files have one tensor for queries, keys and values
KNOBS = CoreKnobs(chunk_size=16, page_size=8, num_pages=60)


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    load_in_turn(monkeypatch)


def loader(folder: Path, **options: Any) -> Load:
    given = LoadOptions("float32", library="transformers", **options)
    return lambda group: load_shard(str(folder), given, group)


def said_by(family: str, folder: Path, vocab_size: int = 212, **changes: Any) -> list[Said]:
    """Two ranks divide a vocabulary of this size, too."""
    network = (save_wrapper if family in WRAPPERS else save)(family, folder, vocab_size=vocab_size, **changes)
    return [generate(network, prompt, NUM_TOKENS) for prompt in PROMPTS]


def assert_said(streams: list[list[int]], said: list[Said]) -> None:
    for stream, right in zip(streams, said, strict=True):
        right.tie(stream)


def assert_served(family: str, folder: Path, size: int = 2, **changes: Any) -> LibraryModel:
    """Return rank 0's model."""
    said = said_by(family, folder, **changes)
    with followers(size, loader(folder)) as team:
        assert isinstance(team.model, LibraryModel)
        streams = streams_of(team.model, greedy_jobs(), KNOBS.num_pages, team)
    assert_said([streams[f"r{rid}"] for rid in range(len(PROMPTS))], said)
    return team.model


def num_parameters(model: Model) -> int:
    assert isinstance(model, LibraryModel)
    return sum(parameter.numel() for parameter in model.network.parameters())


# Equal to the library's own answers


@pytest.mark.parametrize("family", PROBED)
def test_two_ranks_say_what_the_library_says(family: str, tmp_path: Path) -> None:
    model = assert_served(family, tmp_path)
    whole = load(tmp_path)
    assert model.kv_planes(8) == whole.kv_planes(8)
    same = {"stored": None, "tie": 0.0}  # a rank maps only its part, and its sums round in another way
    assert replace(model.spec, **same) == replace(whole.spec, **same)
    most = 1.0 if family == "gpt_oss" else 0.85  # gpt-oss's plan divides only the embedding and the head
    assert num_parameters(model) < most * num_parameters(whole)


def test_ranks_choose_rotary_factors_by_row(tmp_path: Path) -> None:
    """Some of the prompts have up to 60 tokens, and grow beyond the bound."""
    bound = {"original_max_position_embeddings": 50}
    model = assert_served("phi3", tmp_path, **bound, rope_parameters=LONGROPE | bound)
    assert model.spec.short_context == 50 and max(map(len, PROMPTS)) > 50 > min(map(len, PROMPTS))


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {*NO_PLAN, *OTHER_STYLES, *PROBED, SPLIT}))
def test_two_ranks_of_any_family_say_what_the_library_says(family: str, tmp_path: Path) -> None:
    assert_served(family, tmp_path)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt_oss", (1, 2)),
        ("deepseek_v3", (2, 1)),
        pytest.param("gpt_oss", (2, 1), marks=pytest.mark.long),
        pytest.param("deepseek_v3", (1, 2), marks=pytest.mark.long),
    ],
)
def test_unequal_pairs_say_what_the_library_says(family: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    said = said_by(family, tmp_path)
    streams = pair_streams(greedy_jobs(), sizes, loader(tmp_path), load(tmp_path), KNOBS)
    assert_said(streams, said)


def test_what_three_ranks_can_t_divide_stays_whole(tmp_path: Path) -> None:
    """Rank 0 attends alone with 2 KV heads, and 212 rows of the embedding stay whole. An MLP has 96."""
    model = assert_served("qwen3", tmp_path, size=3)
    shapes = {name: tuple(value.shape) for name, value in model.network.named_parameters()}
    assert shapes["model.layers.3.self_attn.k_proj.weight"] == (2 * 16, 64)
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == (212, 64)
    assert shapes["model.layers.3.mlp.up_proj.weight"] == (32, 64)


@pytest.mark.long
@pytest.mark.parametrize("form", ["fp8, ragged blocks", "GPTQ, act order"])
def test_two_ranks_widen_a_quantised_folder(form: str, tmp_path: Path) -> None:
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    save("llama", plain)
    write_quantised(plain, quantised, form)
    jobs = greedy_jobs()
    right = streams_of(load(quantised), jobs, KNOBS.num_pages)
    with followers(2, loader(quantised)) as team:
        assert streams_of(team.model, jobs, KNOBS.num_pages, team) == right


# The pages, which all ranks share


class AttendsLate:
    """A rank's attention that takes its time before it writes."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self.begin, self.mask = attention.begin, attention.mask

    def __call__(self, *args: Any, **more: Any) -> Any:
        time.sleep(0.05)
        return self._attention(*args, **more)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_layer_is_announced_when_every_rank_has_written_it(family: str, tmp_path: Path) -> None:
    """The plan divides llama's heads, and not gpt-oss's."""
    save(family, tmp_path)

    def load_late(group: RankGroup) -> Model:
        model = loader(tmp_path)(group)
        assert isinstance(model, LibraryModel)
        if group.rank:
            model._attention = AttendsLate(model._attention)  # type: ignore[assignment]
            model.attach()
        return model

    with followers(2, load_late) as team:
        planes = team.model.kv_planes(8)
        num_groups, num_slots = len(page_windows(planes)), planes[0].shape[0]
        pool = KVPool(planes, 2 + 8 * num_groups, 8)
        team.share(pool)
        marks, announced = LayerMarks(tuple(range(1, num_slots + 1))), []
        parts = [Part(slot, 1).bytes_in(pool.planes) for slot in range(num_slots)]
        tables = torch.arange(1, 1 + 8 * num_groups, dtype=torch.int32).view(num_groups, 1, 8)
        written = tables[:, 0, :3].flatten().long()  # the pages of 20 tokens
        for mark, where in zip(marks.events, parts, strict=True):
            mark.add_callback(lambda _, where=where: announced.append(pool.pages_bytes[written, where].clone()))
        layout = Layout(torch.tensor([0, 20], dtype=torch.int32), tables.unbind(), 20, 20)
        inputs = ModelInputs(torch.arange(3, 23), torch.arange(20), layout, torch.tensor([19]), layers=marks)
        with torch.inference_mode():
            team.ranks.forward(team.model, inputs, pool)
        assert len(announced) == num_slots - 1, "the last layer is announced when the step ends"
        for bytes_then, where in zip(announced, parts, strict=False):
            assert bytes_then.any() and torch.equal(bytes_then, pool.pages_bytes[written, where])


# What is refused, in one sentence


def divided(family: str, size: int, **changes: Any) -> plan.Division:
    with torch.device("meta"):
        outline = network_of(family, **changes)
    return plan.divide(outline, outline.state_dict(), 0, size)


@pytest.mark.parametrize("family", NO_PLAN)
def test_a_family_without_a_plan_is_named(family: str) -> None:
    with pytest.raises(ConfigError, match=f"--tp 2: the library has no plan that divides {family} among ranks"):
        divided(family, 2)


@pytest.mark.parametrize("family", OTHER_STYLES)
def test_a_family_that_is_divided_in_another_way_is_named(family: str) -> None:
    said = f"--tp 2: the library divides {family} in a way that Baton doesn't know: {OTHER_STYLES[family]}"
    with pytest.raises(ConfigError, match=said):
        divided(family, 2)


def test_an_unknown_style_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "STYLES", {name: one for name, one in plan.STYLES.items() if name != "moe_tp_experts"})
    said = "--tp 4: the library divides qwen3_moe in a way that Baton doesn't know: moe_tp_experts"
    with pytest.raises(ConfigError, match=said):
        divided("qwen3_moe", 4)


def test_a_style_for_another_kind_of_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", {"layers.*.input_layernorm": "rowwise"})
    said = r"--tp: the library divides model\.layers\.0\.input_layernorm, which is LlamaRMSNorm, by rowwise"
    with pytest.raises(ConfigError, match=said):
        divided("llama", 2)


def test_a_family_whose_tensors_are_split_is_named(tmp_path: Path) -> None:
    save(SPLIT, tmp_path)
    outline = network_of(SPLIT)
    with pytest.raises(ConfigError, match=r"the library makes \S*_proj.weight by Split, which can't be cut before"):
        plan.divide(outline, open_tensors(tmp_path).names(), 0, 2)


def test_tensors_that_are_joined_in_an_unknown_way_are_named() -> None:
    turned = WeightConverter("a.*.weight", "experts.up", [MergeModulelist(dim=0), Transpose(1, 2)])
    with pytest.raises(ConfigError, match="the library makes experts.up by MergeModulelist, Transpose, which can't be"):
        plan.cut_before(turned, TensorCut(ROWS), "experts.up")


def refusals(folder: Path) -> list[str]:
    """What two ranks say when they load the folder together."""
    store, found = dist.HashStore(), []

    def load_one(rank: int) -> None:
        try:
            loader(folder)(RankGroup(store, rank, 2, HANG_GUARD_S))
        except ConfigError as error:
            found.append(error.message)

    threads = [threading.Thread(target=load_one, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    return found


@pytest.mark.parametrize(
    ("style", "wrong"),
    [
        ("moe_tp_experts", PartStyle()),  # each rank goes on with its own part of a sum
        ("packed_colwise", PartStyle(ROWS)),  # a rank has the gates, and another the rest
    ],
)
def test_a_wrong_division_is_refused(
    style: str, wrong: PartStyle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both ranks."""
    save("granitemoe", tmp_path)
    monkeypatch.setattr(plan, "STYLES", {**plan.STYLES, style: wrong})
    said = refusals(tmp_path)
    assert len(said) == 2 and all("its logits differ by" in one for one in said)


# Cuts


def test_no_head_is_cut_in_two() -> None:
    """Four ranks could share 32 columns of keys, but not two heads of 16."""
    cuts = divided("qwen3", 4).cuts
    assert len([name for name in cuts if ".mlp." in name]) == 4 * 3
    assert not [name for name in cuts if ".self_attn." in name]


def test_layers_with_fewer_heads_stay_whole() -> None:
    """Layers of Gemma 4 without a window may have fewer KV heads than the others."""
    heads = {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
    cuts = divided("gemma4_text", 4, **heads).cuts
    assert [f"model.layers.{layer}.self_attn.k_proj.weight" in cuts for layer in range(4)] == [True] * 3 + [False]


@pytest.mark.parametrize("cut", [TensorCut(ROWS), TensorCut(COLUMNS), TensorCut(ROWS, pieces=2)])
def test_parts_make_up_the_whole(cut: TensorCut) -> None:
    whole = torch.arange(3 * 12 * 6).view(3, 12, 6)
    parts = [cut.own(whole, rank, 3) for rank in range(3)]
    assert {part.numel() * 3 for part in parts} == {whole.numel()}
    assert torch.equal(cut.whole(torch.stack(parts)), whole)


def test_each_half_of_a_packed_matrix_is_cut() -> None:
    both = torch.arange(8)[:, None].expand(8, 2)
    assert TensorCut(ROWS, pieces=2).own(both, 1, 2)[:, 0].tolist() == [2, 3, 6, 7]


def test_a_bias_is_added_once(tmp_path: Path) -> None:
    """Starcoder's output products have one."""
    network = save("starcoder2", tmp_path)
    for name, value in network.named_parameters():
        if name.endswith("bias"):
            value.data.normal_()
    network.save_pretrained(tmp_path)
    said = [generate(network, prompt, NUM_TOKENS) for prompt in PROMPTS]
    with followers(2, loader(tmp_path)) as team:
        streams = streams_of(team.model, greedy_jobs(), KNOBS.num_pages, team)
    assert_said([streams[f"r{rid}"] for rid in range(len(PROMPTS))], said)
