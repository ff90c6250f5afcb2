"""Draft state across the hand-off: what a decode node does with prefill nodes that draft as it does, otherwise, or not
at all."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from shared.core.sampling_params import SamplingParams
from shared.kv.manager import page_count
from shared.node.loop.node import Node
from shared.node.records.mail import Outgoing
from shared.wire.messages import Prebuilt
from tests.support.cores.core_rig import CoreKnobs, Job, draw_jobs
from tests.support.cores.traces import WIDTH, Trace
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node

HIT_RATE = 70
KNOBS = CoreKnobs(width=WIDTH, hit_rate=HIT_RATE, num_pages=200)
NEVER_DRAFTS = {"spec": "none"}
METRIC = "spec_rows_without_draft_state"


def job(rid: int = 0, length: int = 70, max_tokens: int = 40) -> Job:
    rng = random.Random(rid)
    prompt = tuple(rng.randrange(95) for _ in range(length))
    return Job(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.8), rid + 7)


def nodes(prefill: dict, decode: dict, transport: str = "zmq") -> tuple[Node, Node]:
    p = make_node("prefill", "p0", replace(KNOBS, **prefill), transport=transport)
    return p, make_node("decode", "d0", replace(KNOBS, **decode), transport=transport)


def carry(p: Node, d: Node, jobs: list[Job]) -> None:
    net = Net([p, d])
    keys = [net.generate(p, one, d) for one in jobs]
    net.run()
    for one, key in zip(jobs, keys, strict=True):
        assert net.router.streams[key] == expected(one), one
        assert net.router.end(key).reason in ("stop", "length")
    assert_clean(p, d)


@pytest.mark.parametrize("spec", ["ngram", "eagle", "mtp"])
def test_every_drafter_goes_on_where_the_prefill_node_stopped(spec: str) -> None:
    """Each verify accepts what it would have without a hand-off, from the first one on."""
    p, d = nodes({"spec": spec}, {"spec": spec})
    trace = Trace().on(d.ctx.core)
    carry(p, d, draw_jobs(random.Random(3), 16))
    assert spec == "ngram" or trace.check_each(HIT_RATE) > 50
    assert d.ctx.metrics.counters()[METRIC] == 0


@pytest.mark.parametrize(("spec", "transport"), [("eagle", "zmq"), ("mtp", "shm")])
def test_a_prefill_node_without_a_head_works(spec: str, transport: str) -> None:
    p, d = nodes(NEVER_DRAFTS, {"spec": spec}, transport)
    assert p.ctx.core.pool.page_bytes < d.ctx.core.pool.page_bytes
    carry(p, d, [job(rid) for rid in range(4)])
    assert d.ctx.metrics.counters()[METRIC] == 4
    counters = d.ctx.core.queues.counters
    assert counters.spec_steps > 100, "it verifies, though the drafts know nothing of the prompt"
    assert counters.spec_accepted_tokens <= 4, "but for a chance hit of each row's first draft"


def test_pages_without_draft_state_are_no_prefix_for_others() -> None:
    """They would be wrong drafts for everybody who shares the prompt, also where its own prefill node has a head."""
    p, d = nodes(NEVER_DRAFTS, {"hit_rate": 100})
    shared, net, counters = job(), Net([p, d]), d.ctx.core.queues.counters
    net.generate(p, shared, d)
    net.run()
    assert d.ctx.metrics.counters()[METRIC] == 1
    steps, accepted = counters.spec_steps, counters.spec_accepted_tokens
    key = net.generate(d, replace(shared, rid=9), None)
    net.run()
    assert net.router.streams[key] == expected(shared)
    assert counters.spec_accepted_tokens - accepted > 2 * (counters.spec_steps - steps) > 0
    assert_clean(p, d)


def test_pages_without_draft_state_bring_zeros_not_old_bytes() -> None:
    p, d = nodes(NEVER_DRAFTS, {})
    d.ctx.core.pool.pages_bytes.fill_(0xA5)
    one = job(max_tokens=300)
    net = Net([p, d])
    net.generate(p, one, d)
    net.run(until=lambda: bool(d.ctx.core.queues.running.reqs))
    (req,) = d.ctx.core.queues.running.reqs
    full = d.ctx.core.kv.rows.pages_of(req.row)[: len(one.prompt) // KNOBS.page_size]
    assert len(full) == page_count(len(one.prompt), KNOBS.page_size) - 1 > 0
    assert not d.ctx.core.pool.plane("draft0")[full].any() and d.ctx.core.pool.plane("kv")[full].all()


@pytest.mark.parametrize(
    ("prefill", "decode", "field"),
    [({"hit_rate": 50}, {}, "spec"), ({"spec": "mtp"}, {}, "page_layout"), ({}, {"spec": "ngram"}, "page_layout")],
)
def test_a_pair_that_drafts_differently_is_refused_by_name(prefill: dict, decode: dict, field: str) -> None:
    p, d = nodes(prefill, decode)
    net = Net([p, d])
    key = net.generate(p, job(), d)
    net.run()
    end = net.router.end(key)
    assert end.error_code == "handoff_failed" and f"{field} differs" in end.error_message
    assert_clean(p, d)


@pytest.mark.parametrize("draft", [-1, 96, 1 << 40])
def test_a_draft_beyond_the_vocabulary_fails_its_request_only(draft: int) -> None:
    """It would be an input id of a step that others share."""
    p, d = nodes({}, {})
    net = Net([p, d])
    jobs = [job(0), job(1)]
    keys = [net.generate(p, one, d) for one in jobs]
    forged = []

    def forge(source: str, action: Outgoing) -> None:
        message = action.message
        if isinstance(message, Prebuilt) and message.key == keys[0]:
            wrong = message.draft_state[:-8] + draft.to_bytes(8, "little", signed=True)  # hidden_states, topk_index
            action = replace(action, message=msgspec.structs.replace(message, draft_state=wrong))
            forged.append(message)
        deliver(source, action)

    deliver, net.deliver = net.deliver, forge  # type: ignore[method-assign]
    net.run()
    assert forged and "beyond the vocabulary" in net.router.end(keys[0]).error_message
    assert net.router.streams[keys[1]] == expected(jobs[1])
    assert_clean(p, d)
