"""Certificates of models that the library transformers runs: equal, near ties, and different."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.model.math.interface import Model
from shared.wire.fitting import BY_LIBRARY
from tests.support.cores.certified_replays import certified, forced, verdicts, with_tokens
from tests.support.cores.core_rig import Job, make_core, run_local
from tests.support.models.library_families import KNOBS, PROMPTS, VOCAB, load, network_of

LENGTH = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Each odd token has the score of the even one before it, but for the library's rounding."""
    folder = tmp_path_factory.mktemp("twins")
    network = network_of("llama")
    with torch.no_grad():
        head = network.get_output_embeddings().weight
        head[1::2] = head[:-1:2]
    network.save_pretrained(folder)
    torch.set_num_threads(1)
    return load(folder)


def jobs_of(temperature: float) -> list[Job]:
    sampling = SamplingParams(LENGTH, temperature=temperature)
    return [Job(rid, prompt, sampling, seed=rid) for rid, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_library_s_answers_replay_equal(model: Model, temperature: float) -> None:
    """They were served in other batches and chunks than those of the replay."""
    served = make_core(dataclasses.replace(KNOBS, chunk_size=5, max_running=2), model=model)
    plain = make_core(KNOBS, model=model)
    jobs = jobs_of(temperature)
    tasks = certified(served, jobs, run_local(served, jobs, retract_every=5))
    assert {task.record.replays for task in tasks} == {"near-ties"}
    assert all(BY_LIBRARY in task.record.nodes[0].weights for task in tasks)
    found = verdicts(plain, tasks).values()
    assert all(verdict.is_equal for verdict in found), found
    for core in (served, plain):
        core.close()


def test_a_near_tie_is_equal_and_a_doctored_token_is_not(model: Model) -> None:
    """The certified answer takes the other one of two tokens with one score, and goes on behind it."""
    core = make_core(KNOBS, model=model)
    (task,) = certified(core, [job := jobs_of(0.0)[0]], run_local(core, [job]))
    ids = list(task.token_ids or ())
    tied = forced(core, task, [*ids[:3], ids[3] ^ 1])
    assert tied[3] != ids[3] and len(tied) == LENGTH
    (verdict,) = verdicts(core, [with_tokens(task, tied)]).values()
    assert verdict.is_equal is True and "1 near ties: token 3 is" in verdict.text
    doctored = forced(core, task, [*ids[:3], (ids[3] + 40) % VOCAB])
    (verdict,) = verdicts(core, [with_tokens(task, doctored)]).values()
    assert verdict.is_equal is False and "DIFFERS: token 3 is" in verdict.text
    core.close()
