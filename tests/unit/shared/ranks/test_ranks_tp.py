"""A model shared out among ranks gives the streams of one rank: HashLM the oracle's, Llama the same bits."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.core.errors import ConfigError, RankLost
from shared.device.group import RankGroup
from shared.kernel.attention.attention import AttentionBackend
from shared.kernel.code.step_layout import Layout
from shared.kernel.product.product import supports
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions, open_model
from shared.model.hashlm.model import HashLM
from shared.model.hashlm.shard import HashLMShard
from shared.model.loading.load import load_model
from shared.model.loading.shard import check_shares, load_shard
from shared.model.math.config import ExpertConfig
from shared.model.math.interface import LayerMarks, Model, ModelInputs, ModelOutput
from shared.model.math.kernels import AS_DTYPE, Formats
from shared.sched.steps.events import Ended
from shared.transfer.interface import Part
from tests.support.cores.core_rig import (
    MAX_CONTEXT,
    CoreKnobs,
    Job,
    assert_streams,
    assert_whole,
    draw_jobs,
    make_core,
    run_local,
    some_follow_grammars,
)
from tests.support.cores.tp_rig import followers, pair_streams, streams_of
from tests.support.models.tiny_llama import VOCAB, write_tiny_llama

KNOBS = {
    "plain": CoreKnobs(chunk_size=16, num_pages=40),
    "threads": CoreKnobs(chunk_size=16, num_pages=60, backend="cpu"),
    "chain": CoreKnobs(chunk_size=16, num_pages=60, width=4),
    "tree": CoreKnobs(chunk_size=16, num_pages=60, width=7, topk=2, steps=2),
}
PAGE_SIZE = 4


def hashlm(group: RankGroup) -> HashLMShard:
    return HashLMShard(group, MAX_CONTEXT)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_hashlm_streams_are_the_oracles(size: int, knobs: CoreKnobs) -> None:
    rng = random.Random(size)
    jobs = some_follow_grammars(draw_jobs(rng, 10, max_prompt=60))
    with followers(size, hashlm) as team:
        core = make_core(knobs, model=team.model, ranks=team.ranks)
        team.share(core.pool)
        try:
            outcome = run_local(core, jobs, retract_every=9, rng=rng)
            assert_streams(jobs, outcome)
            assert_whole(core)
        finally:
            core.close()


def inputs_of(ids: list[int], committed: int, wanted: list[int]) -> ModelInputs:
    """One row whose pages are 1, 2, 3, ..."""
    return ModelInputs(
        input_ids=torch.tensor(ids),
        positions=torch.arange(committed, committed + len(ids)),
        layout=Layout(
            cu_q_lens=torch.tensor([0, len(ids)], dtype=torch.int32),
            page_tables=(torch.arange(1, 9, dtype=torch.int32)[None],),
            max_q_len=len(ids),
            max_seq_len=committed + len(ids),
        ),
        logits_idx=torch.tensor(wanted, dtype=torch.int64),
    )


def run_steps(model: Model, pool: KVPool, forward) -> list[ModelOutput]:  # noqa: ANN001
    """A chunk that nobody samples from, one that ends the prompt, a decode step, a window of three."""
    ids = [(7 * i + 3) % VOCAB for i in range(25)]
    steps = [(0, 13, []), (13, 21, [7]), (21, 22, [0]), (22, 25, [0, 1, 2])]
    with torch.inference_mode():
        return [forward(inputs_of(ids[a:b], a, wanted), pool) for a, b, wanted in steps]


def assert_same_bits(folder: Path, dtype: str, size: int, formats: Formats = AS_DTYPE) -> None:
    whole = load_model(str(folder), LoadOptions(dtype, formats=formats))
    pool = KVPool(whole.kv_planes(PAGE_SIZE), 10, PAGE_SIZE)
    expected = run_steps(whole, pool, whole.forward)
    with followers(size, lambda group: load_shard(str(folder), LoadOptions(dtype, formats=formats), group)) as team:
        assert team.model.kv_planes(PAGE_SIZE) == whole.kv_planes(PAGE_SIZE)
        assert team.model.spec == whole.spec
        shared = KVPool(whole.kv_planes(PAGE_SIZE), 10, PAGE_SIZE)
        team.share(shared)
        got = run_steps(team.model, shared, lambda inputs, kv: team.ranks.forward(team.model, inputs, kv))
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours.logits, theirs.logits)
            assert torch.equal(ours.hidden, theirs.hidden)
        assert torch.equal(shared.pages_bytes, pool.pages_bytes)
        assert shared.pages_bytes[6].any(), "nothing was written"


def skip_without_own_products(dtype: str) -> None:
    if not supports(128, getattr(torch, dtype)):
        pytest.skip("the library's products may sum in another order when they have fewer columns")


@pytest.mark.rule("H19")
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_llama_has_the_bits_of_one_rank_in_logits_and_pages(llama: Path, size: int, dtype: str) -> None:
    """8 query and 4 KV heads; with 8 ranks two have the same KV head."""
    skip_without_own_products(dtype)
    assert_same_bits(llama, dtype, size)


@pytest.mark.parametrize("formats", [Formats(weights="int8"), Formats(kv="int8"), Formats("fp8", "fp8")], ids=str)
def test_so_has_one_with_narrow_weights_or_pages(llama: Path, formats: Formats) -> None:
    skip_without_own_products("float32")
    assert_same_bits(llama, "float32", 2, formats)


def test_so_has_a_gemma_with_windows_and_one_kv_head(tmp_path: Path) -> None:
    """Whose layers norm what they add, and scale the embedding."""
    import transformers  # slow, and only for this

    skip_without_own_products("float32")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 7, "max_position_embeddings": 64}
    config = transformers.Gemma3TextConfig(**sizes, **heads, sliding_window_pattern=2)
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    assert_same_bits(tmp_path / "gemma", "float32", 2)


def test_so_has_a_model_with_experts(tmp_path: Path) -> None:
    """All ranks choose the same ones, and have a part of each."""
    import transformers  # slow, and only for this

    skip_without_own_products("float32")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    assert_same_bits(tmp_path / "moe", "float32", 2)


def test_experts_are_not_cut_unevenly(llama: Path) -> None:
    config = replace(open_model(llama).config, experts=ExpertConfig(5, 2, 32, True))
    with pytest.raises(ConfigError, match="5 experts of 32"):
        check_shares(config, 2)


def llama_jobs(rng: random.Random) -> list[Job]:
    return [replace(job, sampling=replace(job.sampling, stop_token_ids=(1,))) for job in draw_jobs(rng, 8, None, 40)]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_llama_streams_are_those_of_one_rank(llama: Path, size: int) -> None:
    """With the scheduler, prefix hits, retraction and all kinds of sampling; exact, in float32."""
    jobs = llama_jobs(random.Random(5))
    expected = streams_of(load_model(str(llama), LoadOptions("float32", max_context=MAX_CONTEXT)), jobs, 24)
    assert len({tuple(stream) for stream in expected.values()}) > 4, "streams that can be told apart"
    with followers(
        size, lambda group: load_shard(str(llama), LoadOptions("float32", max_context=MAX_CONTEXT), group)
    ) as team:
        assert streams_of(team.model, jobs, 24, team) == expected


PAIRS = [(1, 2), (2, 1), (4, 2), (2, 4), (4, 1)]


@pytest.mark.parametrize("sizes", PAIRS)
def test_hashlm_streams_of_unequal_pairs_are_the_oracles(sizes: tuple[int, int]) -> None:
    jobs = some_follow_grammars(draw_jobs(random.Random(2), 6, max_prompt=60))
    whole = HashLM(max_context=MAX_CONTEXT)
    assert pair_streams(jobs, sizes, hashlm, whole, KNOBS["plain"]) == [job.expected() for job in jobs]


@pytest.mark.parametrize("sizes", PAIRS)
def test_llama_streams_of_unequal_pairs_are_those_of_one_rank(llama: Path, sizes: tuple[int, int]) -> None:
    jobs = llama_jobs(random.Random(5))
    whole = load_model(str(llama), LoadOptions("float32", max_context=MAX_CONTEXT))
    expected = streams_of(whole, jobs, 24)

    def load(group: RankGroup) -> Model:
        return load_shard(str(llama), LoadOptions("float32", max_context=MAX_CONTEXT), group)

    got = pair_streams(jobs, sizes, load, whole, KNOBS["plain"])
    assert got == [expected[f"r{job.rid}"] for job in jobs]


@pytest.mark.parametrize(("size", "named"), [(3, "num_heads 8"), (16, "num_heads 8")])
def test_what_can_not_be_shared_out_is_refused_by_name(llama: Path, size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_shares(open_model(llama).config, size)


def test_kv_heads_are_not_cut(llama: Path) -> None:
    config = replace(open_model(llama).config, num_heads=12, num_kv_heads=3, hidden_size=192, vocab_size=192)
    with pytest.raises(ConfigError, match="3 KV heads"):
        check_shares(config, 4 // 2)


@pytest.mark.rule("H19")
def test_a_rank_that_fails_alone_takes_the_step_down_everywhere() -> None:
    """Rank 0 may not go on with ranks that wait in the middle of a step. They give up when their time is over."""

    def impatient(group: RankGroup) -> HashLMShard:
        group.be_patient(0.3)
        return hashlm(group)

    with followers(2, impatient) as team:
        pool = KVPool(team.model.kv_planes(PAGE_SIZE), 10, PAGE_SIZE)
        team.share(pool)

        class Broken:
            def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
                raise IndexError("out of range")

        with pytest.raises(RankLost, match="IndexError: out of range"):
            team.ranks.forward(Broken(), inputs_of([1], 0, []), pool)  # type: ignore[arg-type]
        team.close()
        assert [type(error) for error in team.errors] == [RankLost]
        team.errors.clear()


class LosesARank:
    """Ranks whose third step is the last."""

    def __init__(self) -> None:
        self.steps = 0

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        self.steps += 1
        if self.steps == 3:
            raise RankLost("rank 1 is gone")
        return model.forward(inputs, kv)


@pytest.mark.parametrize("backend", ["inline", "cpu"])
def test_a_lost_rank_ends_the_node_and_fails_no_request(backend: str) -> None:
    """They would be the client's errors; the router takes them elsewhere when the node is gone."""
    core = make_core(CoreKnobs(chunk_size=16, backend=backend), ranks=LosesARank())  # type: ignore[arg-type]
    for job in draw_jobs(random.Random(1), 4):
        core.scheduler.intake.submit(job.request())
    with pytest.raises(RankLost, match="rank 1 is gone"):
        for _ in range(100):
            core.loop.step(block=True)
    assert not [event for event in core.queues.take_events() if isinstance(event, Ended)]
    core.close()


class WritesLate:
    """A follower's model that takes its time, and rank 0's that does not."""

    def __init__(self, group: RankGroup) -> None:
        self._rank = group.rank

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        if self._rank:
            time.sleep(0.05)
            kv.page_view(1)[0] = 7
        return ModelOutput(torch.empty(0, 0), torch.empty(0, 0))


class AttendsLate:
    """An AttentionBackend that takes its time before it writes."""

    def __init__(self, attention: AttentionBackend) -> None:
        self._attention = attention

    def begin(self, *args: torch.Tensor) -> None:
        self._attention.begin(*args)

    def attend(self, *args: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return self._attention.attend(*args)


def test_a_layer_is_announced_when_every_rank_has_written_it(llama: Path) -> None:
    """Rank 0's own heads are half of the page."""

    def load(group: RankGroup) -> Model:
        model = load_shard(str(llama), LoadOptions("float32"), group)
        if group.rank:
            model._attention = AttendsLate(model._attention)  # type: ignore[attr-defined]
        return model

    with followers(2, load) as team:
        pool = KVPool(team.model.kv_planes(PAGE_SIZE), 10, PAGE_SIZE)
        team.share(pool)
        marks, announced = LayerMarks((1, 2)), []
        parts = [Part(0, 1).bytes_in(pool.planes), Part(1, 1).bytes_in(pool.planes)]
        for mark, where in zip(marks.events, parts, strict=True):
            mark.add_callback(lambda _, where=where: announced.append(pool.pages_bytes[1:4, where].clone()))
        inputs = replace(inputs_of(list(range(3, 14)), 0, [10]), layers=marks)
        with torch.inference_mode():
            team.ranks.forward(team.model, inputs, pool)
        for bytes_then, where in zip(announced, parts, strict=True):
            assert torch.equal(bytes_then, pool.pages_bytes[1:4, where])


def test_when_a_step_is_over_its_pages_are_final_on_every_rank() -> None:
    """Also of a step without outputs, where the model itself meets nobody at the end."""
    with followers(2, WritesLate) as team:  # type: ignore[arg-type]
        pool = KVPool(HashLM().kv_planes(PAGE_SIZE), 10, PAGE_SIZE)
        team.share(pool)
        team.ranks.forward(team.model, inputs_of([1], 0, []), pool)
        assert pool.page_view(1)[0] == 7
