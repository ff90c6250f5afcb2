"""Adapters on several ranks: the bits and the streams of one rank, for each row its own adapter."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.kernel.code.step_layout import Layout
from shared.kernel.product.product import supports
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.hashlm.model import HashLM
from shared.model.hashlm.shard import HashLMShard
from shared.model.loading.load import load_model
from shared.model.loading.shard import load_shard
from shared.model.math.interface import AdapterSpec, Model, ModelInputs, ModelOutput
from tests.support.cores.core_rig import (
    MAX_CONTEXT,
    CoreKnobs,
    Job,
    assert_streams,
    assert_whole,
    draw_jobs,
    make_core,
    run_local,
)
from tests.support.cores.tp_rig import followers, streams_of
from tests.support.models.tiny_adapters import adapter
from tests.support.models.tiny_llama import VOCAB, write_tiny_llama

PAGE_SIZE = 4
ROWS = 4
SLOTS = (2, 0, 1, 2)  # which adapter each row has


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapters(llama: Path) -> dict[str, str]:
    """One of every product, one of some, of another rank."""
    every = adapter(llama, llama / "every", 1)
    some = adapter(llama, llama / "some", 2, targets=("q", "v", "o", "up", "down"), rank=6)
    return {"every": str(every), "some": str(some)}


def inputs_of(start: int, stop: int) -> ModelInputs:
    """Tokens [start, stop) of each row, with its adapter; logits of all of them."""
    count = stop - start
    ids = [(7 * i + 3 * row) % VOCAB for row in range(ROWS) for i in range(start, stop)]
    return ModelInputs(
        input_ids=torch.tensor(ids),
        positions=torch.arange(start, stop).repeat(ROWS),
        layout=Layout(
            cu_q_lens=torch.arange(0, ROWS * count + 1, count, dtype=torch.int32),
            page_tables=(torch.arange(1, 1 + 4 * ROWS, dtype=torch.int32).view(ROWS, 4),),
            max_q_len=count,
            max_seq_len=stop,
        ),
        logits_idx=torch.arange(ROWS * count),
        adapters=torch.tensor(SLOTS).repeat_interleave(count),
    )


def run_steps(model: Model, forward) -> tuple[list[ModelOutput], KVPool]:  # noqa: ANN001
    pool = KVPool(model.kv_planes(PAGE_SIZE), 1 + 4 * ROWS, PAGE_SIZE)
    with torch.inference_mode():
        return [forward(inputs_of(a, b), pool) for a, b in ((0, 9), (9, 10), (10, 13))], pool


def assert_same_bits(folder: Path, adapters: dict[str, str], dtype: str, size: int) -> None:
    if not supports(128, getattr(torch, dtype)):
        pytest.skip("the library's products may sum in another order when they have fewer columns")
    whole = load_model(str(folder), LoadOptions(dtype, adapters=adapters))
    expected, pages = run_steps(whole, whole.forward)
    plain, _ = run_steps(whole, lambda inputs, kv: whole.forward(replace(inputs, adapters=None), kv))
    for row, slot in enumerate(SLOTS):
        equal = torch.equal(*(out[0].logits.view(ROWS, 9, -1)[row] for out in (expected, plain)))
        assert equal == (slot == 0), "adapters that do something"
    with followers(size, lambda group: load_shard(str(folder), LoadOptions(dtype, adapters=adapters), group)) as team:
        assert team.model.spec == whole.spec
        shared = KVPool(whole.kv_planes(PAGE_SIZE), 1 + 4 * ROWS, PAGE_SIZE)
        team.share(shared)
        got, _ = run_steps(team.model, lambda inputs, _: team.ranks.forward(team.model, inputs, shared))
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.logits, theirs.logits)
        assert torch.equal(ours.hidden, theirs.hidden)
    assert torch.equal(shared.pages_bytes, pages.pages_bytes)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_with_and_without_have_the_bits_of_one_rank(
    llama: Path, adapters: dict[str, str], dtype: str, size: int
) -> None:
    """8 query and 4 KV heads; with 8 ranks two have the same KV head, and the same rows of its adapters."""
    assert_same_bits(llama, adapters, dtype, size)


def test_so_has_a_model_with_experts(tmp_path: Path) -> None:
    """Adapters of its attention, beside experts that all ranks share out."""
    import transformers  # slow, and only for this

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    paths = [adapter(tmp_path / "moe", tmp_path / str(n), n, targets=("q", "k", "o")) for n in (1, 2)]
    assert_same_bits(tmp_path / "moe", {"a": str(paths[0]), "b": str(paths[1])}, "float32", 2)


def jobs_of(rng: random.Random, digests: tuple[str, ...]) -> list[Job]:
    """Each prompt twice, under one adapter and under another, or none."""
    jobs = draw_jobs(rng, 6, None, 40)
    choices = ["", *digests]
    first = [replace(job, adapter=choices[n % 3]) for n, job in enumerate(jobs)]
    return first + [replace(job, rid=10 + job.rid, adapter=choices[(n + 1) % 3]) for n, job in enumerate(jobs)]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_llama_streams_are_those_of_one_rank(llama: Path, adapters: dict[str, str], size: int) -> None:
    """With the scheduler, prefix hits, retraction and all kinds of sampling; exact, in float32."""
    whole = load_model(str(llama), LoadOptions("float32", max_context=MAX_CONTEXT, adapters=adapters))
    jobs = jobs_of(random.Random(5), tuple(own.digest for own in whole.spec.adapters))
    jobs = [replace(job, sampling=replace(job.sampling, stop_token_ids=(1,))) for job in jobs]
    expected = streams_of(whole, jobs, 60)
    same = [expected[f"r{n}"] == expected[f"r{10 + n}"] for n in range(6)]
    assert same.count(False) > 3, "streams that show their adapter"

    def load(group) -> Model:  # noqa: ANN001
        return load_shard(str(llama), LoadOptions("float32", max_context=MAX_CONTEXT, adapters=adapters), group)

    with followers(size, load) as team:
        assert streams_of(team.model, jobs, 60, team) == expected


def test_hashlm_streams_are_the_oracles() -> None:
    named = tuple(AdapterSpec(name, name) for name in ("one", "two"))
    jobs = jobs_of(random.Random(2), ("one", "two"))
    with followers(2, lambda group: HashLMShard(group, MAX_CONTEXT, named)) as team:
        assert team.model.spec == HashLM(max_context=MAX_CONTEXT, adapters=named).spec
        core = make_core(CoreKnobs(chunk_size=16, num_pages=60, backend="cpu"), model=team.model, ranks=team.ranks)
        team.share(core.pool)
        try:
            outcome = run_local(core, jobs, retract_every=9, rng=random.Random(3))
            assert_streams(jobs, outcome)
            assert_whole(core)
        finally:
            core.close()
