"""What a router says of a conversation's return reaches the caches of its nodes, and changes only what they evict."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router.requests.answered import Answered, AnswerKind
from router.requests.returns import ASSUMED_S
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Keep, Key, Message
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.node_pair import ROUTER_EPOCH, ROUTER_ID, Net, assert_clean, make_node
from tests.support.worlds.router_rig import RouterRig

PROMPT = list(range(1, 60))


def said(rig: RouterRig, answered: Answered, rids: list[str]) -> list[tuple[str, Message]]:
    return rig.dispatcher.close(rids, [answered], rig.now).sends


def test_both_nodes_hear_when_an_answer_called_tools() -> None:
    rig = RouterRig()
    rig.join("prefill", "p")
    decode = rig.join("decode", "d")
    (generate,) = rig.open(PROMPT)
    key = generate.key
    assert said(rig, Answered(key.rid, AnswerKind.CALLS), []) == [], "it has not ended"
    rig.run(decode, key, 0, [1])
    rig.end(decode, key, 1)
    word = Keep(key, round(1000 * ASSUMED_S))
    assert said(rig, Answered(key.rid, AnswerKind.CALLS), [key.rid]) == [("p@1", word), ("d@1", word)]
    assert said(rig, Answered(key.rid, AnswerKind.CALLS), [key.rid]) == [], "said once"


def test_a_stop_string_ends_an_answer_too() -> None:
    rig = RouterRig(local_tokens=1000)
    decode = rig.join("decode", "d")
    (generate,) = rig.open(PROMPT)
    rig.run(decode, generate.key, 0, [1])
    rig.dispatcher.close_sequence(generate.key.rid, 0, rig.now)
    assert len(said(rig, Answered(generate.key.rid, AnswerKind.CALLS), [])) == 1


def test_an_ended_answer_is_forgotten_when_its_client_goes() -> None:
    rig = RouterRig(local_tokens=1000)
    decode = rig.join("decode", "d")
    (generate,) = rig.open(PROMPT)
    rig.run(decode, generate.key, 0, [1])
    rig.end(decode, generate.key, 1)
    rig.dispatcher.close([generate.key.rid], [], rig.now)
    assert said(rig, Answered(generate.key.rid, AnswerKind.CALLS), []) == []


def test_the_nodes_hear_that_a_session_left_a_branch() -> None:
    rig = RouterRig(local_tokens=1000)
    decode = rig.join("decode", "d")
    told = []
    for prompt in (PROMPT, [*PROMPT[:20], *range(60, 99)]):
        rig.now += 1.0
        (generate,) = rig.open(prompt)
        rig.run(decode, generate.key, 0, [1])
        rig.end(decode, generate.key, 1)
        told.append((generate.key, said(rig, Answered(generate.key.rid, session="s", names_session=True), [])))
    (first, nothing), (_, words) = told
    assert nothing == [] and words == [("d@1", Keep(first, 0))]


SAMPLING = SamplingParams(max_tokens=10, temperature=0.0)
WHOLE = 5  # pages of such a prompt and answer


def job(rid: int, prompt: tuple[int, ...] = ()) -> Job:
    own = random.Random(rid)
    return Job(rid, prompt or tuple(own.randrange(95) for _ in range(70)), SAMPLING, 5, tenant=1)


class OneNode:
    """A node whose pool has room for four conversations."""

    def __init__(self, **knobs: int) -> None:
        self.node = make_node("decode", "d0", CoreKnobs(num_pages=4 * WHOLE + 1, **knobs))  # type: ignore[arg-type]
        self.net = Net([self.node])

    def ask(self, *jobs: Job) -> list[int]:
        """Return the cached tokens of each job, one after the other."""
        cached = []
        for one in jobs:
            key = self.net.generate(self.node, one)
            self.net.run()
            assert self.net.router.streams[key] == one.expected()
            cached.append(self.net.router.end(key).cached_tokens)
        return cached

    def keep(self, rid: int, seconds: float) -> None:
        self.net.to_node("d0@1", Keep(Key(*KEY[:2], f"r{rid}", 0, 0), round(1000 * seconds)))
        self.net.run()

    @property
    def saved(self) -> int:
        return self.node.ctx.core.queues.counters.kept_prefix_tokens


KEY = (ROUTER_ID, ROUTER_EPOCH)
FIRST = job(0)
NEXT = job(99, (*FIRST.prompt, *FIRST.expected(), *range(9)))
CROWD = [job(rid) for rid in range(1, 6)]


@pytest.mark.parametrize(("seconds", "later", "cached"), [(60, 59, 64), (60, 60, 0), (None, 0, 0)])
def test_a_kept_conversation_outlives_younger_ones(seconds: float | None, later: float, cached: int) -> None:
    site = OneNode()
    site.ask(FIRST)
    if seconds is not None:
        site.keep(FIRST.rid, seconds)
    site.net.now += later
    assert site.ask(*CROWD) == [0] * 5
    assert site.ask(NEXT) == [cached] and (site.saved > 0) == (cached > 0)
    assert_clean(site.node)


def test_one_that_will_hardly_return_goes_first() -> None:
    site = OneNode()
    site.ask(FIRST, *CROWD[:2])
    site.keep(CROWD[1].rid, 0)
    assert site.ask(CROWD[2], CROWD[3], NEXT) == [0, 0, 64]
    assert_clean(site.node)


def test_an_older_branch_goes_first_although_it_was_kept() -> None:
    site = OneNode()
    branch = job(98, (*FIRST.prompt[:32], *range(40)))
    site.ask(FIRST)
    site.keep(FIRST.rid, 60)
    assert site.ask(branch) == [32]
    site.keep(FIRST.rid, 0)
    assert site.ask(*CROWD[:4]) == [0] * 4, "which takes three cached pages"
    assert site.ask(replace(branch, rid=97), replace(FIRST, rid=96)) == [48, 32]
    assert_clean(site.node)


def test_kept_pages_make_nobody_wait() -> None:
    site = OneNode()
    for one in (FIRST, *CROWD):
        site.ask(one)
        site.keep(one.rid, 3600)
    longest = Job(50, tuple(range(90)) * 3, SAMPLING, 5)
    assert site.ask(longest) == [0]
    assert_clean(site.node)


def test_a_word_about_an_unknown_request_does_nothing() -> None:
    site = OneNode()
    site.keep(7, 60)
    site.ask(FIRST)
    assert_clean(site.node)


def test_a_prefill_node_keeps_the_prompt_it_handed_over() -> None:
    p, d = make_node("prefill", "p0", CoreKnobs(num_pages=4 * WHOLE + 1)), make_node("decode", "d0", CoreKnobs())
    net = Net([p, d])
    for one in (FIRST, *CROWD, NEXT):
        key = net.generate(p, one, d)
        net.run()
        assert net.router.streams[key] == one.expected()
        if one is FIRST:
            net.to_node("p0@1", Keep(key, 60_000))
    assert p.ctx.core.queues.counters.kept_prefix_tokens == 64
    assert_clean(p, d)
