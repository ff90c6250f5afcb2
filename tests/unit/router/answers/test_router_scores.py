"""Log-probabilities of prompts at the router: on one node, each position once, whatever becomes of the node; and how
answers show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import GenerationPlan, PromptJob, ShowOptions, UsageShown
from router.api.answer.prompts import Prompts
from router.api.openai.chat import ChatShape
from router.api.openai.completions import CompletionShape
from router.fleet.registry import RegisteredNode
from router.requests.effects import Effects, ScoredPrompt
from router.text.hashlm import HashTokenizer
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Key, Scores, TokenLogprob
from tests.support.worlds.router_rig import RouterRig, generates, ids_of

PROMPT = [10, 11, 12, 13]
SCORED = SamplingParams(max_tokens=2, prompt_logprobs=1)


def entry(value: float) -> TokenLogprob:
    return TokenLogprob(value, (40, 41), (value, value - 1))


def say(rig: RouterRig, node: RegisteredNode, key: Key, first: int, values: Sequence[float]) -> Effects:
    entries = [entry(value) for value in values]
    return rig.dispatcher.scores(Scores(node.node_id, node.hello.epoch, key, first, entries), rig.now)


def values_of(effects: Effects) -> list[float]:
    return [own.logprob for news in effects.news if isinstance(news, ScoredPrompt) for own in news.logprobs]


@pytest.fixture
def rig() -> RouterRig:
    return RouterRig()


def test_a_scored_prompt_stays_on_one_node_a_prefill_node_if_any(rig: RouterRig) -> None:
    """Its scores come ahead of its first token then, in order, over one connection."""
    decode = rig.join("decode", "d")
    (alone,) = rig.open(PROMPT, sampling=SCORED)
    assert not alone.decode_node and decode.ours.open_sequences == 1
    prefill = rig.join("prefill", "p")
    (generate,) = rig.open(PROMPT, sampling=SCORED)
    assert not generate.decode_node and generate.scored == 1 and prefill.ours.open_sequences == 1
    (plain,) = rig.open(PROMPT)
    assert plain.decode_node == "d"


def test_each_position_is_taken_once_and_in_order(rig: RouterRig) -> None:
    node = rig.join("prefill", "p")
    key = rig.open(PROMPT, sampling=SCORED)[0].key
    assert values_of(say(rig, node, key, 1, [-1.0, -2.0])) == [-1.0, -2.0]
    assert values_of(say(rig, node, key, 1, [-1.0, -2.0])) == []
    assert values_of(say(rig, node, key, 2, [-2.0, -3.0])) == [-3.0]
    assert values_of(say(rig, node, key, 4, [-9.0])) == [], "there is no such token"


def test_a_gap_and_scores_that_nobody_asked_for_are_told_of(rig: RouterRig) -> None:
    node = rig.join("prefill", "p")
    asked, plain = rig.open(PROMPT, sampling=SCORED)[0].key, rig.open(PROMPT)[0].key
    for key, first in ((asked, 2), (plain, 1)):
        effects = say(rig, node, key, first, [-1.0])
        assert not effects.news and [alarm.kind for alarm in effects.alarms] == ["malformed scores of a prompt"]


def test_what_is_known_is_not_asked_for_again() -> None:
    rig = RouterRig(max_attempts=2)
    first = rig.join("prefill", "p0")
    key = rig.open(PROMPT, sampling=SCORED)[0].key
    say(rig, first, key, 1, [-1.0, -2.0])
    rig.join("prefill", "p1")
    rig.registry.remove(first)
    (again,) = generates(rig.dispatcher.node_lost(first, "gone", rig.now))
    assert again.scored == 3
    other = rig.registry.named("p1")
    assert other is not None
    assert values_of(say(rig, other, again.key, 3, [-3.0])) == [-3.0]


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_token_or_end_ahead_of_scores_shows_that_they_are_lost(has_tokens: bool) -> None:
    rig = RouterRig(max_attempts=2)
    node = rig.join("prefill", "p")
    key = rig.open(PROMPT, sampling=SCORED)[0].key
    say(rig, node, key, 1, [-1.0])
    effects = rig.run(node, key, 0, [20]) if has_tokens else rig.end(node, key, 2)
    (again,) = generates(effects)
    assert not effects.news and again.scored == 2 and again.output_ids == [[]]
    assert values_of(say(rig, node, again.key, 2, [-2.0, -3.0])) == [-2.0, -3.0]
    assert ids_of(rig.run(node, again.key, 0, [20])) == [20]


def test_a_prompt_of_one_token_has_nothing_to_be_scored(rig: RouterRig) -> None:
    node = rig.join("prefill", "p")
    key = rig.open(PROMPT[:1], sampling=SCORED)[0].key
    assert ids_of(rig.run(node, key, 0, [20])) == [20]


# ---- answers


def shown(ids: list[int], echo: str = "", **options: Any) -> tuple[GenerationPlan, Prompts]:
    show = ShowOptions((), False, UsageShown.NEVER, return_token_ids=False, num_logprobs=1, **options)
    plan = GenerationPlan("hashlm", (PromptJob(ids, 0, echo),), 1, SCORED, show)
    return plan, Prompts(plan, HashTokenizer())


def test_an_echo_has_the_prompt_s_logprobs_before_the_answer_s() -> None:
    plan, prompts = shown([65, 66], "ab", echoes_logprobs=True)
    assert not prompts.are_scored
    prompts.add_scores(0, [entry(-1.0)])
    assert prompts.are_scored
    delta = Delta("c", [67], [entry(-2.0)], [2])
    choice = CompletionShape(HashTokenizer(), plan.show).whole(0, delta, prompts.shown(0))
    assert msgspec.to_builtins(choice.logprobs) == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"H": -1.0}, {"H": -2.0, "I": -3.0}],
        "text_offset": [0, 1, 2],
    }
    assert choice.text == "abc"


def test_the_prompt_s_logprobs_as_a_field_of_their_own() -> None:
    plan, prompts = shown([65, 66], prompt_logprobs=1)
    prompts.add_scores(0, [entry(-1.0)])
    b = {"logprob": -1.0, "rank": None, "decoded_token": "b"}
    h = {"logprob": -1.0, "rank": 1, "decoded_token": "H"}
    assert msgspec.to_builtins(prompts.shown(0).logprobs) == [None, {"66": b, "40": h}]
    inside = CompletionShape(HashTokenizer(), plan.show).whole(0, Delta(), prompts.shown(0))
    assert inside.prompt_logprobs == prompts.shown(0).logprobs
    assert ChatShape.prompt_on_top and not CompletionShape.prompt_on_top
