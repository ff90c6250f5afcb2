"""A Llama in pipeline stages has the bits of one model: logits, hidden states, captured layers and pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config.models.model_folder import read_folder
from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.engine.drafter import Drafter
from shared.kernel.code.step_layout import Layout
from shared.kernel.product.product import supports
from shared.kv.pool import KVPool
from shared.model.formats.hf_config import config_from_hf
from shared.model.formats.opened import LoadOptions
from shared.model.llama.llama import LlamaModel
from shared.model.llama.llama_compiled import CompiledLlama
from shared.model.loading.load import load_eagle_head, load_model
from shared.model.loading.pipeline import StagedModel, load_pipeline
from shared.model.math.interface import Carried, Model, ModelInputs, ModelOutput, Stage
from shared.model.math.kernels import Formats
from shared.model.math.span import cut
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.settings import SchedSettings
from shared.speculation.eagle import EagleWorkerV2
from tests.support.cores.core_pair import CorePair, run_pair
from tests.support.cores.core_rig import Job, Outcome, assert_whole, run_local
from tests.support.models.draft_head import VOCAB, head_config, head_tensors, save_head, save_target
from tests.support.models.tiny_adapters import adapter
from tests.support.models.tiny_families import WHOLE, llama, save
from tests.support.models.tiny_models import Rows, prompt, save_random

STEPS = (  # a chunk that nobody samples from, a mixed step, decode steps of two rows, outputs out of order
    ({0: slice(0, 40)}, []),
    ({0: slice(40, 41), 1: slice(0, 9)}, [0, 9]),
    ({1: slice(9, 30)}, [20]),
    ({0: slice(41, 42), 1: slice(30, 31)}, [1, 0, 0]),
    ({0: slice(42, 45)}, None),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers that run as one program where the processor has our products."""
    folder = tmp_path_factory.mktemp("whole")
    save_random(llama(**WHOLE, tie_word_embeddings=True)(), folder)
    return folder


def capture(model: Model, layers: tuple[int, ...]) -> None:
    model.capture_aux(layers)  # type: ignore[attr-defined]


def pipeline(folder: Path, dtype: str, stages: int, *, heads_every_row: bool = True, **how: Any) -> StagedModel:
    options = LoadOptions(dtype, **how)
    model, own = load_pipeline(str(folder), options, stages, heads_every_row=heads_every_row)
    assert isinstance(model, StagedModel) and len(own) == stages
    return model


def run_steps(model: Model, monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[list[ModelOutput], Rows]:
    rows, ids, outputs = Rows(model, 2, 16), prompt(60), []
    forward = model.forward

    def keep(inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        outputs.append(forward(inputs, kv))
        return outputs[-1]

    monkeypatch.setattr(model, "forward", keep)
    for chunks, wanted in STEPS:
        rows.step({row: ids[part] for row, part in chunks.items()}, wanted, **how)
    return outputs, rows


def assert_same(one: Model, staged: Model, monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    assert (one.spec, one.kv_planes(16)) == (staged.spec, staged.kv_planes(16))
    for layers in ((), (0, 2, 3)):
        capture(one, layers)
        capture(staged, layers)
        expected, pages = run_steps(one, monkeypatch, **how)
        got, own_pages = run_steps(staged, monkeypatch, **how)
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.hidden, theirs.hidden)
            assert (ours.aux is None) == (theirs.aux is None) == (not layers)
            assert ours.aux is None or theirs.aux is not None and torch.equal(ours.aux, theirs.aux)
        assert torch.equal(own_pages.pool.pages_bytes, pages.pool.pages_bytes)


@pytest.mark.parametrize(
    ("kernels", "dtype", "stages"),
    [
        ("torch", "float32", 2),
        ("torch", "bfloat16", 3),
        ("separate", "float32", 3),
        ("separate", "bfloat16", 4),
        ("auto", "float32", 4),
        ("auto", "bfloat16", 2),
    ],
)
def test_stages_have_the_bits_of_one_model(
    whole: Path, kernels: str, dtype: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = load_model(str(whole), LoadOptions(dtype, kernels=kernels))
    staged = pipeline(whole, dtype, stages, kernels=kernels)
    if kernels == "auto" and supports(128, getattr(torch, dtype)):
        assert all(isinstance(part, CompiledLlama) for part in staged._parts)
    assert_same(one, staged, monkeypatch)


OTHERS = ("qwen2", "qwen3, odd size", "qwen3-moe, every second layer", "mistral, windowed, whole", "gemma3, whole")


@pytest.mark.parametrize("family", [*OTHERS, "gemma3, stretched, capped"])
def test_so_have_those_of_other_families(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(family, tmp_path)
    for stages in (2, 3):
        assert_same(
            load_model(str(tmp_path), LoadOptions("float32")), pipeline(tmp_path, "float32", stages), monkeypatch
        )


@pytest.mark.parametrize("formats", [Formats(weights="int8"), Formats(kv="int8"), Formats("fp8", "fp8")], ids=str)
def test_so_have_narrow_weights_and_pages(whole: Path, formats: Formats, monkeypatch: pytest.MonkeyPatch) -> None:
    one = load_model(str(whole), LoadOptions("float32", formats=formats))
    assert_same(one, pipeline(whole, "float32", 2, formats=formats), monkeypatch)


def test_so_have_rows_with_adapters(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {name: str(adapter(whole, tmp_path / name, seed)) for name, seed in (("a", 1), ("b", 2))}
    one, staged = (
        load_model(str(whole), LoadOptions("float32", adapters=named)),
        pipeline(whole, "float32", 2, adapters=named),
    )
    got = [run_steps(each, monkeypatch, adapters={0: 2, 1: 0})[0] for each in (one, staged)]
    plain = run_steps(load_model(str(whole), LoadOptions("float32")), monkeypatch)[0]
    for theirs, ours in zip(*got, strict=True):
        assert torch.equal(theirs.logits, ours.logits)
    assert not torch.equal(plain[1].logits[0], got[1][1].logits[0]), "an adapter that does nothing"


def inputs_of(ids: Sequence[int], first: int, page: int) -> ModelInputs:
    return ModelInputs(
        input_ids=torch.tensor(ids),
        positions=torch.arange(first, first + len(ids)),
        layout=Layout(
            cu_q_lens=torch.tensor([0, len(ids)], dtype=torch.int32),
            page_tables=(torch.tensor([[page]], dtype=torch.int32),),
            max_q_len=len(ids),
            max_seq_len=first + len(ids),
        ),
        logits_idx=torch.arange(len(ids)),
    )


@pytest.mark.parametrize("kernels", ["torch", "separate", "auto"])
def test_what_is_carried_is_the_next_stage_s_own(whole: Path, kernels: str) -> None:
    """The first stage has done three steps before the second begins: nothing of theirs lies in its scratch."""
    one, staged = (
        load_model(str(whole), LoadOptions("float32", kernels=kernels)),
        pipeline(whole, "float32", 2, kernels=kernels),
    )
    for model in (one, staged):
        capture(model, (1, 2))
    pools = [KVPool(one.kv_planes(16), 5, 16) for _ in range(2)]
    steps = [inputs_of(prompt(9, page), 0, page) for page in (1, 2, 3)]
    lower, upper = staged.stages
    with torch.inference_mode():
        expected = [one.forward(inputs, pools[0]) for inputs in steps]
        carried = [lower(inputs, None, pools[1]) for inputs in steps]
        for inputs, values, theirs in zip(steps, carried, expected, strict=True):
            assert isinstance(values, Carried) and values.values.dtype == torch.float32
            ours = upper(inputs, values, pools[1])
            assert isinstance(ours, ModelOutput) and ours.aux is not None and theirs.aux is not None
            assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.aux, theirs.aux)
    assert torch.equal(pools[0].pages_bytes, pools[1].pages_bytes)


def test_stages_share_no_scratch(whole: Path) -> None:
    """They run at the same time."""
    for kernels in ("separate", "torch"):
        first, second = pipeline(whole, "float32", 2, kernels=kernels)._parts
        assert isinstance(first, LlamaModel) and isinstance(second, LlamaModel)
        assert first._blocks is not second._blocks and first._attention is not second._attention


def test_layers_are_cut_by_what_a_step_reads(whole: Path) -> None:
    config = config_from_hf(read_folder(whole))
    assert [(span.first, span.end) for span in cut(config, 2, heads_every_row=False)] == [(0, 2), (2, 4)]
    assert [(span.first, span.end) for span in cut(config, 3, heads_every_row=False)] == [(0, 1), (1, 3), (3, 4)]
    huge = replace(config, vocab_size=100_000)
    assert [(span.first, span.end) for span in cut(huge, 2, heads_every_row=True)] == [(0, 3), (3, 4)]
    for stages in (1, 2, 3, 4):
        spans = cut(huge, stages, heads_every_row=True)
        assert len(spans) == stages and all(span.first < span.end for span in spans)
        assert [layer for span in spans for layer in range(span.first, span.end)] == [0, 1, 2, 3]


def test_more_stages_than_layers_are_refused(whole: Path) -> None:
    with pytest.raises(ConfigError, match="--pp 5: .* has 4 layers"):
        load_pipeline(str(whole), LoadOptions("float32"), 5)
    with pytest.raises(ConfigError, match="--pp 3: .* has 2 layers"):
        load_pipeline("hashlm", LoadOptions("float32"), 3)


SAMPLINGS = (
    SamplingParams(30, temperature=0.0),
    SamplingParams(30, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=0),
    SamplingParams(30, temperature=0.8, top_p=0.9, presence_penalty=0.5),
)


def make_core(folder: Path, stages: int, backend: str = "cpu", drafter: Drafter | None = None) -> NodeCore:
    if stages == 1:
        return core_of(load_model(str(folder), LoadOptions("float32")), (), backend, drafter)
    return core_of(*load_pipeline(str(folder), LoadOptions("float32"), stages), backend, drafter)


def core_of(
    model: Model, stages: tuple[Stage, ...], backend: str = "cpu", drafter: Drafter | None = None, width: int = 4
) -> NodeCore:
    streams = make_streams(backend, on_thread_start=lambda: torch.set_num_threads(1), num_stages=max(1, len(stages)))
    width = 1 if drafter is None else width
    settings = SchedSettings(16, 128, chunk_size=16, mixed_chunk_size=16, width=width)
    return assemble_core(model, streams, settings, CoreSizes(60, 8), drafter=drafter, stages=stages)


def jobs() -> list[Job]:
    return [Job(rid, tuple(prompt(n, rid)), SAMPLINGS[rid % 3], rid) for rid, n in enumerate((1, 15, 16, 30, 50, 7))]


def run(core: NodeCore) -> Outcome:
    outcome = run_local(core, jobs(), retract_every=11, rng=random.Random(3))
    assert_whole(core)
    core.close()
    return outcome


@pytest.fixture(scope="module")
def plain(whole: Path) -> dict[str, list[int]]:
    streams = run(make_core(whole, 1, "inline")).streams
    assert len(streams) == 6 and all(len(stream) == 30 for stream in streams.values())
    return streams


@pytest.mark.parametrize(("backend", "stages"), [("inline", 4), ("cpu", 2)])
def test_streams_are_those_of_one_stage(whole: Path, backend: str, stages: int, plain: dict[str, list[int]]) -> None:
    assert run(make_core(whole, stages, backend)).streams == plain


@pytest.mark.parametrize("stages", [2, 3])
def test_nor_do_those_of_a_head_that_reads_captured_layers(stages: int, tmp_path: Path) -> None:
    """Its layers lie in several stages, and its own forward on the first one's stream."""
    target, folder = tmp_path / "target", tmp_path / "head"
    save_target(target)
    folder.mkdir()
    save_head(folder, head_tensors(), head_config())
    plain = run(make_core(target, 1, "inline")).streams
    model, own = load_pipeline(str(target), LoadOptions("float32"), stages)
    head = load_eagle_head(str(folder), str(target), model)  # type: ignore[arg-type]
    capture(model, head.aux_layers)
    drafter = EagleWorkerV2(head, VOCAB, topk=2, steps=3)
    assert run(core_of(model, own, drafter=drafter, width=8)).streams == plain


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (3, 2)])
def test_nodes_of_any_numbers_of_stages_pair(
    whole: Path, prefill: int, decode: int, plain: dict[str, list[int]]
) -> None:
    """Pages are the node's, with all layers, so that they are the same for every number of stages."""
    pair = CorePair(make_core(whole, prefill), make_core(whole, decode))
    assert run_pair(pair, jobs(), retract_every=9).streams == plain
    pair.close()


def test_a_stage_that_raises_costs_one_step(whole: Path, plain: dict[str, list[int]]) -> None:
    core = make_core(whole, 2)
    (second,) = core.engine.stages.later
    calls = 0

    def faulty(inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> Carried | ModelOutput:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise RuntimeError("injected")
        return second(inputs, carried, kv)

    core.engine.stages.later = (faulty,)
    outcome = run_local(core, jobs())
    assert core.loop.num_failed_steps == 1
    assert outcome.streams == plain
    assert_whole(core)
    core.close()
