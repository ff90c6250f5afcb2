"""The simulation's oracles refuse what they must, each by itself; and a seed that proves too little does not count."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from prefill_node.pulls import PrefixPull
from prefill_node.side import PrefillSide
from router.requests.effects import Update
from router.requests.journal import OpenRequest
from router.requests.new_request import NewRequest
from shared.config.settings.silence import LinkSilence
from shared.core.errors import WireError
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.wire.codec import decode, encode
from shared.wire.messages import Abort, Key, SequenceEnd, TokenLogprob, Tokens
from shared.wire.peers import PeerClosed, Received, peer_name
from shared.wire.unreadable import unreadable
from tests.support.sim.clients import Stream, WrongStream, streams_of
from tests.support.sim.cluster import Cluster
from tests.support.sim.faults import AIM
from tests.support.sim.hosts import NodeHost
from tests.support.sim.moods import draw_plan
from tests.support.sim.oracles import TWO_BEATS_S, AnswerWatch, Violation, check_node_s_friends
from tests.support.sim.pauses import MOST_STEPS, PauseWatch
from tests.support.sim.plan import GENERATE_FAULTS, FaultPlan, RequestPlan
from tests.support.sim.report import SeedReport
from tests.support.sim.summary import Summary
from tests.support.sim.timers import Timers
from tests.support.sim.trace import Trace
from tests.support.sim.wire import Network, Port
from tests.support.wire.wire_samples import GENERATE


def stream(num_logprobs: int = -1) -> Stream:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, num_logprobs=num_logprobs)
    return streams_of("r0/1#", RequestPlan((1, 2, 3), 1, sampling, seed=7))[0]


def update(ids: list[int], end: SequenceEnd | None = None, logprobs: tuple[TokenLogprob, ...] = ()) -> Update:
    return Update("1", 0, ids, logprobs, end)


def end(count: int = 4, reason: str = "length") -> SequenceEnd:
    return SequenceEnd(Key("r0", 1, "1", 0, 0), reason, count, 0, "", "")


def test_the_reference_in_any_pieces_is_right() -> None:
    whole, pieces = stream(), stream()
    ids = whole.reference.ids
    whole.take(update(ids, end()))
    for token in ids:
        pieces.take(update([token]))
    pieces.take(update([], end()))
    assert whole.is_over and pieces.is_over


@pytest.mark.parametrize("fault", ["wrong", "twice", "gap", "too many", "short", "reason", "usage", "after the end"])
def test_anything_else_is_wrong(fault: str) -> None:
    one = stream()
    ids = one.reference.ids
    steps = {
        "wrong": [update([(ids[0] + 1) % 95])],
        "twice": [update(ids[:2]), update(ids[1:2] * 2)],
        "gap": [update(ids[1:])],
        "too many": [update([*ids, ids[0]])],
        "short": [update(ids[:3], end(3))],
        "reason": [update(ids, end(reason="stop"))],
        "usage": [update(ids, end(3))],
        "after the end": [update(ids, end()), update([], end())],
    }[fault]
    with pytest.raises(WrongStream):
        for step in steps:
            one.take(step)


def test_logprobs_are_held_to_the_reference() -> None:
    one = stream(num_logprobs=0)
    right = [TokenLogprob(value, (), ()) for value in one.reference.logprobs]
    one.take(update(one.reference.ids[:1], logprobs=(right[0],)))
    with pytest.raises(WrongStream, match="logprob"):
        one.take(update(one.reference.ids[1:2], logprobs=(TokenLogprob(right[1].logprob - 0.5, (), ()),)))
    with pytest.raises(WrongStream, match="0 logprobs"):
        one.take(update(one.reference.ids[1:2]))
    with pytest.raises(WrongStream, match="nobody asked"):
        stream().take(update(one.reference.ids[:1], logprobs=(right[0],)))


def test_only_hard_seeds_count_and_failures_always() -> None:
    hard = SeedReport(1, num_nodes=2, num_requests=20, hits=Counter(crash=2, reset=1))
    assert hard.counts
    for change in ({"num_nodes": 1}, {"num_nodes": 13}, {"num_requests": 19}, {"hits": Counter(crash=3)}):
        assert not SeedReport(**{"seed": 2, "num_nodes": 2, "num_requests": 20, "hits": hard.hits} | change).counts
    summary = Summary()
    summary.add(hard)
    summary.add(SeedReport(3, failure="wrong"))
    assert (summary.counted, summary.uncounted, len(summary.failures)) == (1, 1, 1)
    assert summary.missing and any("never" in line for line in summary.lines())


def test_plans_cover_what_they_promise() -> None:
    plans = [draw_plan(seed) for seed in range(200)]
    assert {plan.mood for plan in plans} >= {"normal", "harsh", "gentle", "overload", "drains"}
    assert {len(plan.nodes) for plan in plans} >= {2, 3, 4, 5, 6, 8, 9, 10, 11}
    requests = [request for plan in plans for client in plan.clients for request in client.requests]
    assert all(sum(len(client.requests) for client in plan.clients) >= 20 for plan in plans)
    assert max(request.num_sequences for request in requests) == 3
    for feature in ("stop_token_ids", "min_tokens", "logit_bias", "top_k"):
        assert any(getattr(request.sampling, feature) for request in requests), feature
    assert any(request.sampling.needs_history for request in requests)
    assert any(request.sampling.num_logprobs > 0 for request in requests)
    assert any(client.hangs_up_after is not None for plan in plans for client in plan.clients)
    assert len({fault.kind for plan in plans for fault in plan.faults}) == 31


def test_nothing_strikes_after_the_faults_are_over() -> None:
    """A step that was to fail and a fault that still looked for a victim hit the probes (seeds 22065, 22861)."""
    cluster = Cluster(draw_plan(0))
    host, faults = cluster.nodes[0], cluster.faults
    host.start()
    assert host.node is not None
    model = host.node.ctx.core.model
    late = FaultPlan(at=0.0, kind="slow node", lasts=9.0, draw=AIM)
    faults.strike(late, tries=0)
    assert host.slowness > 1.0 or any(node.slowness > 1.0 for node in cluster.nodes)
    faults._fail_step(host, late)
    assert "forward" in vars(model)
    faults.end()
    faults.strike(late, tries=0)
    assert "forward" not in vars(model) and all(node.slowness == 1.0 for node in cluster.nodes)
    cluster.close()


def test_a_slow_way_is_one_hit_once_a_page_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(draw_plan(0))
    faults, way = cluster.faults, ("decode-0", "prefill-0")
    open_message, other = end_message(), Tokens("p0", 1, [], [])
    monkeypatch.setattr(faults, "_is_of_an_open_request", lambda message: message is open_message)
    faults.strike(FaultPlan(at=0.0, kind="slow frames", lasts=9.0, draw=0.0, pair=way))
    assert faults.net.byte_s and not faults.hits
    for message, hosts in ((other, way), (open_message, ("decode-0", "r0"))):
        faults.net.on_slow(message, frozenset(hosts))
    assert not faults.hits
    for _ in range(2):
        faults.net.on_slow(open_message, frozenset(way))
    assert faults.hits == {"slow frames": 1}
    cluster.close()


@pytest.mark.parametrize("lost", ["dialled", "accepted"])
def test_a_pull_ends_with_the_link_that_its_node_dialled(lost: str) -> None:
    """Two nodes have dialled each other, one of these connections ends, and the other one still brings messages."""
    cluster = Cluster(draw_plan(next(seed for seed in range(100) if draw_plan(seed).nodes[0].role == "prefill")))
    host, timers = cluster.nodes[0], Timers()
    host.start()
    net = Network(timers, random.Random(1), Trace(), LinkSilence(ping_ms=500, timeout_ms=2500), 100)
    puller, source = (Port(net, name, peer_name(name, 1), f"tcp://{name}:1", lambda: None) for name in "ab")
    for own, other in ((puller, source), (source, puller)):
        own.dial(other.identity, other.endpoint)
    timers.run_until(1.0)
    by_dialler = {conn.near.port: conn for conn in net.conns}
    assert puller.send(source.identity, message(0)) and source.send(puller.identity, message(1))
    timers.run_until(2.0)
    puller.poll()
    host.port = puller
    pull_from(host, source.identity)
    check_node_s_friends(host)
    conn = by_dialler[puller if lost == "dialled" else source]
    net.unanswered = {("a", "b"), ("b", "a")}
    net.close(conn, conn.near, "was cut")
    timers.run_until(3.0)
    assert PeerClosed(source.identity, accepted=lost == "accepted") in puller.poll()
    goes_on = pytest.raises(Violation, match="told that it is gone") if lost == "dialled" else nullcontext()
    with goes_on:
        check_node_s_friends(host)
    assert source.send(puller.identity, message(2), back=lost == "accepted")
    timers.run_until(4.0)
    assert puller.poll() == [Received(source.identity, message(2), ())]
    with goes_on:
        check_node_s_friends(host)
    cluster.close()


def test_what_came_to_nothing_is_not_waited_for() -> None:
    cluster, watch = Cluster(draw_plan(0)), AnswerWatch()
    host, request = cluster.routers[0], OpenRequest("1", NewRequest([1], 1, SamplingParams(max_tokens=1), 0), 9.0)
    host.start()
    host.journal.add_request(request)
    for _ in range(2):
        watch.came_to_nothing(Key(*host.identity, "1", request.attempt.number, 0), 1.0)
        watch.look(host, 1.0 + TWO_BEATS_S)
        request.begin_next_attempt()
        watch.look(host, 9.0)
    watch.came_to_nothing(Key(*host.identity, "1", 2, 0), 1.0)
    with pytest.raises(Violation, match="waits for an answer"):
        watch.look(host, 1.1 + TWO_BEATS_S)


def test_each_fault_spoils_the_next_generate_alone() -> None:
    cluster = Cluster(draw_plan(0))
    faults, data, hosts, came_to_nothing = cluster.faults, encode(GENERATE), frozenset(("r0", "d")), []
    faults.came_to_nothing = came_to_nothing.append
    found = {}
    for kind in GENERATE_FAULTS:
        faults.strike(FaultPlan(at=0.0, kind=kind, lasts=0.0, draw=0.0))
        assert cluster.net.tamper(message(0), b"other", hosts) == b"other"
        found[kind] = cluster.net.tamper(GENERATE, data, hosts)
        assert cluster.net.tamper(GENERATE, data, hosts) == data
    keys = [len(unreadable("r0", found[kind] or b"", WireError(""))) for kind in GENERATE_FAULTS]
    assert keys == [1, 0, 0, 1] and found["vanished"] is None
    assert decode(found["earlier life"] or b"") != GENERATE
    assert came_to_nothing == [GENERATE] * 4 and sum(faults.hits.values()) == 4
    cluster.close()


def pull_from(host: NodeHost, source: str) -> None:
    assert host.node is not None and isinstance(host.node.side, PrefillSide)
    req = Request(RequestKey("r0", 1, "1", 0, 0), NodeAsk(np.arange(3), SamplingParams(max_tokens=1), 0), 1)
    pull = PrefixPull(Key("r0", 1, "1", 0, 0), req, source, 1, 0.0, 9.0, 0, 1, req.all_ids())
    host.node.side.pulls.open[pull.lease] = pull


def test_a_timeline_shows_a_request_and_every_fault() -> None:
    trace = Trace()
    trace.note(0.5, "p0.1", "<- r0", end_message())
    trace.note(0.7, "d0", "FAULT crash")
    trace.note(0.9, "d0.2", "starts")
    assert [line.split()[1] for line in trace.lines("r0/1#")] == ["p0.1", "d0"]
    assert len(trace.lines()) == 3 and trace.digest() == trace.digest()


def message(number: int) -> Abort:
    return Abort(Key("r0", 1, str(number), 0, 0), False)


def end_message() -> Tokens:
    return Tokens("p0", 1, [], [end()])


def test_the_summary_says_what_a_second_of_both_costs() -> None:
    summary = Summary(steps=600, messages=1000, cpu_s=3.0, engine_s=2.0)
    assert summary.speeds == (300.0, 1000.0) and summary.seconds_for_both == 3.0
    assert any("300 steps and 2000 messages take 3.00 s" in line for line in summary.lines())


@pytest.mark.parametrize(("begins_here", "fails"), [(True, False), (False, False), (True, True)])
def test_a_stream_may_pause_only_for_so_many_steps(begins_here: bool, fails: bool) -> None:
    """Unless a step failed, or it goes on after a fault elsewhere and has not begun here."""
    req = Request(
        RequestKey("r", 1, "1", 0, 0), NodeAsk(np.arange(3), SamplingParams(max_tokens=9), 0), 0, output_ids=[5]
    )
    loop = SimpleNamespace(num_steps=1, num_failed_steps=0)
    core = SimpleNamespace(loop=loop, queues=SimpleNamespace(requests={req.key: req}))
    host = SimpleNamespace(name="d", lives=1, node=SimpleNamespace(ctx=SimpleNamespace(core=core)))
    watch = PauseWatch()
    watch.look(host)  # type: ignore[arg-type]
    if begins_here:
        req.output_ids.append(6)
        watch.look(host)  # type: ignore[arg-type]
    loop.num_steps += MOST_STEPS
    watch.look(host)  # type: ignore[arg-type]
    loop.num_steps, loop.num_failed_steps = loop.num_steps + 1, int(fails)
    is_wrong = begins_here and not fails
    with pytest.raises(Violation, match="pause for 401 steps") if is_wrong else nullcontext():
        watch.look(host)  # type: ignore[arg-type]
    assert watch.longest == (MOST_STEPS + is_wrong if begins_here else 0)
