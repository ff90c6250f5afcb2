"""Models whose longer texts have other rotary factors (longrope): each row has those that the library takes for the row
alone, whatever rows share its steps. The texts end below the bound, cross it in their answers, or begin beyond it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.model.library.long_factors import LongFactors, short_context_of
from shared.model.library.model import LibraryModel
from shared.speculation.ngram import NgramWorkerV2
from tests.support.cores.core_pair import make_pair, run_pair
from tests.support.cores.core_rig import CoreKnobs, Job, assert_whole, make_core, run_local
from tests.support.models.library_families import (
    BOUND,
    KNOBS,
    LONGROPE,
    NUM_TOKENS,
    SIZES,
    TWO_FACTORS,
    VOCAB,
    Family,
    generate,
    load,
    network_of,
    save,
)

# tokens of the prompts; the answers have NUM_TOKENS each
LENGTHS = (20, BOUND - NUM_TOKENS, BOUND - 9, BOUND - 1, BOUND, BOUND + 1, BOUND + 40)


def prompts() -> list[tuple[int, ...]]:
    """All begin alike, so that pages would be shared."""
    stem = random.Random(5).choices(range(3, VOCAB), k=max(LENGTHS))
    return [tuple(stem[:length]) for length in LENGTHS]


PROMPTS = prompts()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=TWO_FACTORS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make("phi3", tmp_path_factory.mktemp("model"))


def make(name: str, folder: Path) -> Family:
    network = save(name, folder, **TWO_FACTORS[name])
    model = load(folder)
    assert isinstance(model, LibraryModel) and model.spec.max_context == 512
    return Family(name, folder, network, model, [generate(network, prompt, NUM_TOKENS) for prompt in PROMPTS])


def jobs(first: int = 0) -> list[Job]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    return [Job(first + rid, prompt, params, seed=rid) for rid, prompt in enumerate(PROMPTS)]


def test_the_bound_changes_answers(phi3: Family) -> None:
    """Otherwise these tests would show nothing."""
    short = {**LONGROPE, "long_factor": LONGROPE["short_factor"]}
    network = save("phi3", phi3.folder.parent / "short", rope_parameters=short, original_max_position_embeddings=BOUND)
    found = [generate(network, prompt, NUM_TOKENS).ids for prompt in PROMPTS]
    equal = [ids == said.ids for ids, said in zip(found, phi3.said, strict=True)]
    assert equal[:2] == [True, True] and not any(equal[3:])


@pytest.mark.parametrize("name", TWO_FACTORS)
def test_a_step_rotates_each_row_as_if_alone(name: str) -> None:
    """The end of a longer text, a shorter one up to the bound, and a draft of it beyond."""
    network: Any = network_of(name, **TWO_FACTORS[name])
    rotary, x = network.model.rotary_emb, torch.zeros(())
    whole = [rotary(x, torch.arange(length)[None]) for length in (BOUND + 9, BOUND)]
    factors = LongFactors(network)
    positions = torch.tensor([[BOUND - 2, BOUND + 8, 5, BOUND - 1, BOUND + 1]])
    with factors.by_row(torch.tensor([True, True, False, False, False])):
        mixed = rotary(x, positions)
    with factors.by_row(None):
        short = rotary(x, positions[:, 2:])
    for index in range(2):  # cos and sin
        long_row, short_row = whole[0][index][0], whole[1][index][0]
        right = torch.stack([long_row[BOUND - 2], long_row[BOUND + 8], short_row[5], short_row[BOUND - 1]])
        assert torch.equal(mixed[index][0, :4], right) and torch.equal(short[index][0, :2], right[2:])
        assert torch.equal(rotary(x, torch.arange(BOUND + 9)[None])[index], whole[0][index]), "the library's own"


@pytest.mark.parametrize("knobs", [KNOBS, CoreKnobs("inline", overlap=False, chunk_size=16, page_size=8, mix=False)])
def test_every_row_has_its_own_factors(knobs: CoreKnobs, family: Family) -> None:
    """In shared steps, handed over, retracted, and with cached prompts."""
    pair = make_pair(knobs, model=family.model)
    for first in (0, 10):
        run_pair(pair, jobs(first), retract_every=9, rng=random.Random(1))
        family.assert_said([pair.outcome.streams[f"r{first + rid}"] for rid in range(len(PROMPTS))])
    for core in (pair.prefill, pair.decode):
        assert_whole(core)
    pair.close()


@pytest.mark.parametrize("more", [{}, {"cold_pages": 60, "num_pages": 40}])
def test_drafts_and_parked_pages_change_nothing(more: dict[str, int], phi3: Family) -> None:
    """Windows of four tokens, on a node that both prefills and decodes."""
    core = make_core(replace(KNOBS, width=4, **more), model=phi3.model, drafter=NgramWorkerV2())
    for first in (0, 10):
        outcome = run_local(core, jobs(first), retract_every=9, rng=random.Random(1))
        phi3.assert_said([outcome.streams[f"r{first + rid}"] for rid in range(len(PROMPTS))])
    assert core.queues.counters.spec_accepted_tokens > 0
    assert_whole(core)
    core.close()


def test_scores_are_those_of_the_whole_text(phi3: Family) -> None:
    """A prompt's log-probabilities, below and above the bound, in one step."""
    core, params = make_core(KNOBS, model=phi3.model), SamplingParams(1, temperature=0.0, prompt_logprobs=0)
    chosen = (0, len(PROMPTS) - 1)
    outcome = run_local(core, [Job(rid, PROMPTS[rid], params, seed=0) for rid in chosen])
    core.close()
    for rid in chosen:
        ids = torch.tensor([PROMPTS[rid]])
        with torch.inference_mode():
            right = phi3.network(ids).logits[0].log_softmax(-1)
        found = torch.tensor([one.logprob for one in outcome.scores[f"r{rid}"]])
        torch.testing.assert_close(found, right[:-1].gather(1, ids.T[1:])[:, 0], atol=1e-3, rtol=0)


def test_a_shorter_context_has_one_kind_of_text(phi3: Family) -> None:
    assert load(phi3.folder).spec.short_context == BOUND
    spec = load(phi3.folder, max_context=BOUND).spec
    assert (spec.short_context, spec.max_context) == (0, BOUND)


def test_other_families_are_what_their_whole_forward_is(tmp_path: Path) -> None:
    """Their `generate` keeps the cache at the bound, so its answers depend on how the text came about."""
    network = save("llama", tmp_path, rope_parameters=LONGROPE)
    model = load(tmp_path)
    assert isinstance(model, LibraryModel)
    said = [generate(network, prompt, NUM_TOKENS, use_cache=False) for prompt in PROMPTS]
    core = make_core(KNOBS, model=model)
    outcome = run_local(core, jobs())
    core.close()
    Family("llama", tmp_path, network, model, said).assert_said(
        [outcome.streams[f"r{rid}"] for rid in range(len(said))]
    )


@pytest.mark.parametrize("is_long", [False, True])
def test_the_check_refuses_factors_of_the_other_kind(
    is_long: bool, phi3: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_row = LongFactors.by_row

    def other(self: LongFactors, own: torch.Tensor | None) -> Any:
        return by_row(self, None if own is None else torch.full_like(own, is_long))

    monkeypatch.setattr(LongFactors, "by_row", other)
    with pytest.raises(ConfigError, match="its logits differ by .* from the library's own whole forward"):
        load(phi3.folder)


def test_layers_with_other_bounds_are_refused() -> None:
    config = transformers.CONFIG_MAPPING["phi3"](**SIZES, **TWO_FACTORS["phi3"])
    assert short_context_of(config) == BOUND
    config.rope_parameters = {"full_attention": LONGROPE, "other": LONGROPE | {"original_max_position_embeddings": 32}}
    with pytest.raises(ConfigError, match="longrope needs one original_max_position_embeddings for all layers"):
        short_context_of(config)
