"""Models with an encoder: its keys and values are computed once, whole, travel with the request's pages, and are built
again where a request begins again. The integer model is the exact oracle; T5 must give transformers' answers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.kernel.code.step_layout import Layout
from shared.kv.pool import KVPool
from shared.model.encoder.t5 import T5Model, bucket_of
from shared.model.encoder.t5_file import load_t5
from shared.model.math.interface import ModelInputs
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.sched.steps.prompts import ForEncoder, InChunks
from shared.sched.steps.settings import SchedSettings
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, make_core, run_local
from tests.support.cores.equivalence_cells import Watch, run_cell
from tests.support.cores.scripted_core import Script, job
from tests.support.oracles.hash_seq2seq import HashSeq2Seq
from tests.support.oracles.hashlm_reference import seq2seq_stream

NUM_SEEDS = 24


@pytest.mark.parametrize("cell", range(NUM_SEEDS))
def test_streams_are_the_reference_s(cell: int) -> None:
    """The matrix of test_equivalence: handed over, retracted, mixed, in any order; no draft heads, no cold tier."""
    run_cell(80_000 + cell, Watch(), num_jobs=24, encoder=True)


def test_every_encoder_token_shows_in_every_answer() -> None:
    one = job(1, 30, 20)
    other = (*one.prompt[:12], (one.prompt[12] + 1) % 95, *one.prompt[13:])
    streams = [seq2seq_stream(prompt, one.sampling, one.seed, 20) for prompt in (one.prompt, other)]
    assert streams[0] != streams[1]


def with_encoder(rid: int, num_prompt: int, max_tokens: int = 12) -> Job:
    return replace(job(rid, num_prompt, max_tokens), encoder=True)


def test_prompts_are_never_cut() -> None:
    script = Script(encoder=True, chunk_size=16)
    jobs = [with_encoder(1, 40), with_encoder(2, 9), with_encoder(3, 6), with_encoder(4, 60)]
    script.submit(*jobs)
    assert_streams(jobs, script.finish())
    for plan in script.plans:
        for index in range(plan.num_prefill):
            assert plan.emits[index], "all of a prompt in one step"
    assert ForEncoder().share([40, 9, 6], [], 16) == [40, 0, 0]
    assert ForEncoder().share([4, 9, 6, 3], [], 16) == [4, 9, 0, 3] and ForEncoder().share([], [], 16) == []


def test_a_retracted_request_builds_its_encoder_s_part_again() -> None:
    script = Script(encoder=True)
    one = with_encoder(1, 21, 30)
    (req,) = script.submit(one)
    script.run_until_running(req)
    script.core.queues.retract(req)
    assert_streams([one], script.finish())
    assert script.core.queues.counters.prompt_tokens > 2 * 21
    assert_whole(script.core)


def test_equal_beginnings_of_two_inputs_share_nothing() -> None:
    """A prefix cache would take the first pages of one for the other's."""
    script = Script(encoder=True, page_size=4)
    one = with_encoder(1, 24)
    other = replace(one, rid=2, prompt=(*one.prompt[:20], 5, 6, 7, 8))
    script.submit(one)
    script.finish()
    script.submit(other)
    assert_streams([one, other], script.finish())
    assert script.outcome.ends["r2"].cached_tokens == 0


def test_what_it_can_t_do_is_refused() -> None:
    settings = SchedSettings(page_size=4, max_context=64)
    with pytest.raises(ConfigError, match="no cold tier"):
        assemble_core(HashSeq2Seq(), make_streams("inline"), settings, CoreSizes(20, 2, cold_pages=3))
    with pytest.raises(ConfigError, match="draft heads"):
        make_core(CoreKnobs(encoder=True, width=4))
    core = make_core(CoreKnobs(encoder=True, page_size=4))
    core.scheduler.planner._settings = replace(core.settings, prompts=InChunks(), chunk_size=5)
    outcome = run_local(core, [with_encoder(1, 20)])
    assert "encoder tokens" in str(outcome.ends["r1"].error), "an input that was cut is an error, not another answer"
    core.close()


# ---- T5


def tiny(folder: Path, **changes: object) -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=96, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_decoder_layers=3, num_heads=3,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, decoder_start_token_id=0,
        eos_token_id=95, **changes,
    )  # fmt: skip
    network = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.3)
    network.save_pretrained(folder)
    return network


KINDS = {
    "t5": {},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


def greedy(network: transformers.T5ForConditionalGeneration, prompt: tuple[int, ...], num: int) -> list[int]:
    """transformers', without its cache: the decoder's last logits each time."""
    said = [0]
    for _ in range(num):
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([said]), use_cache=False)
        said.append(int(logits.logits[0, -1].argmax()))
        if said[-1] == 95:
            break
    return said[1:]


def serve(model: T5Model, jobs: list[Job], retract_every: int = 0) -> dict[str, list[int]]:
    settings = SchedSettings(page_size=4, max_context=200)
    core = assemble_core(model, make_streams("cpu"), settings, CoreSizes(120, 4))
    try:
        outcome = run_local(core, jobs, retract_every=retract_every, rng=random.Random(1))
        assert_whole(core)
        return outcome.streams
    finally:
        core.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retract_every", [0, 7])
def test_answers_of_t5_are_those_of_transformers(kind: str, retract_every: int, tmp_path: Path) -> None:
    network = tiny(tmp_path, **KINDS[kind])
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(1, 95) for _ in range(length)) for length in (1, 5, 17, 40)]
    sampling = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=(95,))
    jobs = [Job(rid, (*prompt, 0), sampling, 1) for rid, prompt in enumerate(prompts)]
    streams = serve(load_t5(tmp_path), jobs, retract_every)
    for rid, prompt in enumerate(prompts):
        assert streams[f"r{rid}"] == greedy(network, prompt, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_t5_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    network, model = tiny(tmp_path, **KINDS[kind]), load_t5(tmp_path)
    generator = torch.Generator().manual_seed(1)
    source, said = (torch.randint(1, 95, (n,), generator=generator) for n in (33, 9))
    ids = torch.cat([source, said])
    pool = KVPool(model.kv_planes(4), 14, 4)
    inputs = ModelInputs(
        input_ids=ids,
        positions=torch.arange(len(ids)),
        layout=Layout(
            cu_q_lens=torch.tensor([0, len(ids)], dtype=torch.int32),
            page_tables=(torch.randperm(11, generator=generator).add(1).int().unsqueeze(0),),
            max_q_len=len(ids),
            max_seq_len=len(ids),
            encoder_lens=torch.tensor([33]),
        ),
        logits_idx=torch.arange(33, len(ids)),
    )
    with torch.no_grad():
        theirs = network(input_ids=source[None], decoder_input_ids=said[None], use_cache=False).logits[0]
    torch.testing.assert_close(model.forward(inputs, pool).logits, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets_are_those_of_transformers(both_ways: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300, 301)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional=both_ways, num_buckets=32, max_distance=128)
    assert torch.equal(bucket_of(distance, 32, 128, both_ways), theirs)


def test_a_tensor_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"encoder.more.weight": torch.zeros(2)}, path)
    with pytest.raises(ConfigError, match=r"not read: encoder\.more"):
        load_t5(tmp_path)
    apart = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(tensors | {apart: torch.zeros(8, 3)}, path)
    load_t5(tmp_path)  # the first T5 files have it, and transformers leaves it out too
    save_file(tensors | {"shared.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(ConfigError, match=r"shared\.weight is \(2, 2\)"):
        load_t5(tmp_path)
