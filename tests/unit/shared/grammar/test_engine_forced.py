"""Drafts of rows under a grammar: first the tokens that it forces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from llguidance import LLMatcher

from shared.core.sampling_params import SamplingParams
from shared.engine.verify import Drafts
from shared.engine.window import with_forced
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, make_core
from tests.support.cores.steps import results_of, run_until_still, tokens_of
from tests.support.oracles.grammar_oracle import following, make_grammars

WIDTH, OFF = 4, -1
PROPOSED = [[50, 51, 52]]
TREE = torch.tensor([[0, 0, 1]])
TEXT = "the quick brown fox jumps over the lazy dog"
GRAMMAR = LLMatcher.grammar_from_regex(f"{TEXT}[a-z]{{3}}{TEXT}")
KNOBS = {
    "chain": CoreKnobs(width=WIDTH, hit_rate=0),
    "tree": CoreKnobs(width=7, topk=2, steps=2, hit_rate=0),
    "ngram": CoreKnobs(width=WIDTH, spec="ngram"),
    "no overlap": CoreKnobs(width=WIDTH, hit_rate=0, overlap=False),
    "simulated": CoreKnobs("simulated", width=WIDTH, hit_rate=0),
}


def drafts_of(committed: int, forced: list[int], parents: torch.Tensor | None = None) -> Drafts:
    """A chunk's row and a decode row. The decode row's token 10 is the first that is forced."""
    arrays = SimpleNamespace(forced=torch.tensor([forced]), forced_from=torch.tensor([10]))
    plan = SimpleNamespace(num_prefill=1, width=WIDTH)
    fb = SimpleNamespace(arrays=arrays, plan=plan, committed=torch.tensor([99, committed]))
    return with_forced(fb, Drafts(torch.tensor(PROPOSED), parents))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("committed", "forced", "expected"),
    [
        (9, [1, 2, 3, 4], [1, 2, 3]),  # the bonus token, with index 9, is processed already
        (10, [1, 2, 3, 4], [2, 3, 4]),  # the step in flight has drawn token 10
        (12, [1, 2, 3, 4], [4, 51, 52]),  # and took drafts, too
        (13, [1, 2, 3, 4], [50, 51, 52]),
        (99, [1, 2, 3, 4], [50, 51, 52]),
        (9, [1, 2, OFF, OFF], [1, 2, 52]),
        (9, [OFF] * 4, [50, 51, 52]),
        (7, [1, 2, 3, 4], [50, 51, 52]),
    ],
)
def test_forced_tokens_come_before_the_drafter_s(committed: int, forced: list[int], expected: list[int]) -> None:
    assert drafts_of(committed, forced).ids.tolist() == [expected]


def test_a_row_with_forced_tokens_has_a_chain_in_a_tree() -> None:
    found = drafts_of(9, [1, 2, 3, 4], TREE)
    assert found.ids.tolist() == [[1, 2, 3]] and found.parents is not None and found.parents.tolist() == [[0, 1, 2]]
    kept = drafts_of(13, [1, 2, 3, 4], TREE)
    assert kept.ids.tolist() == PROPOSED and kept.parents is not None and kept.parents.tolist() == TREE.tolist()


@pytest.mark.parametrize("kind", KNOBS)
def test_an_answer_goes_fast_where_its_grammar_forces_it(kind: str) -> None:
    """The drafter is wrong about nearly all tokens; three of the answer's 89 are free."""
    core = make_core(KNOBS[kind], grammars=make_grammars())
    jobs = [Job(0, (1, 2, 3), following(SamplingParams(200, temperature=0.8), GRAMMAR), 5)]
    jobs.append(Job(1, (1, 2, 4), SamplingParams(30, temperature=0.8), 6))
    seen = results_of(core)
    outcome = run_until_still(core, jobs)
    assert_streams(jobs, outcome)
    per_step = tokens_of(seen, "r0")
    assert len(outcome.streams["r0"]) == 2 * len(TEXT) + 4 and len(per_step) < 40, per_step
    assert_whole(core)
