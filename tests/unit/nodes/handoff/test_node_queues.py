"""Who gets memory first on the two nodes, and whose messages count: one scripted story per rule."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from decode_node.shares import Shares
from prefill_node.side import PrefillSide
from shared.core.sampling_params import SamplingParams
from shared.node.loop.node import Node
from shared.sched.steps.settings import SchedSettings
from shared.wire.codec import key_of
from shared.wire.messages import Grant, Installed, Key, Message, Prebuilt, Ready, Wait
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.cores.hand_driven import HandDriven
from tests.support.worlds.faulty_pair import linked, pair
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node, name_of, sibling

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SMALL = CoreKnobs(chunk_size=32, num_pages=13, prefix_cache=False)  # 12 pages of 16 tokens


def job(rid: int, length: int, max_tokens: int = 12) -> Job:
    rng = random.Random(rid)
    ids = tuple(rng.randrange(95) for _ in range(length))
    return Job(rid, ids, replace(GREEDY, max_tokens=max_tokens), rid + 7)


def errors(node: Node) -> float:
    return node.ctx.metrics.counters()["wire_errors"]


# ---- one order for all who wait


def test_a_local_prompt_does_not_overtake_an_offer_that_waits() -> None:
    p, d = make_node("prefill", "p0", CoreKnobs(chunk_size=32)), make_node("decode", "d0", SMALL)
    net = Net([p, d])
    net.generate(d, job(0, 80, 40))  # takes 6 pages and grows
    net.run(until=lambda: bool(net.router.streams))
    big = net.generate(p, job(1, 120), d)  # needs 9
    net.run(until=lambda: bool(net.messages(Wait)))
    order: list[str] = []
    net.on_message = lambda src, dst, m: note(order, m) if src == name_of(d) else None
    locals_ = [net.generate(d, job(2 + i, 20)) for i in range(3)]  # 2 pages each: there is room for them now
    net.run()
    assert order[0] == "grant r1", order
    for key, one in zip([big, *locals_], [job(1, 120), *(job(2 + i, 20) for i in range(3))], strict=True):
        assert net.router.streams[key] == expected(one)
    assert_clean(p, d)


def note(order: list[str], message: Message) -> None:
    if isinstance(message, Grant):
        order.append(f"grant {message.key.rid}")
    for run in getattr(message, "runs", []):
        if run.first_pos == 0 and run.key.rid != "r0":
            order.append(f"first token of {run.key.rid}")


def test_an_offer_does_not_overtake_a_local_prompt_that_waits() -> None:
    p, d = make_node("prefill", "p0", CoreKnobs(chunk_size=32)), make_node("decode", "d0", SMALL)
    net = Net([p, d])
    net.generate(d, job(0, 80, 40))
    net.run(until=lambda: bool(net.router.streams))
    local = net.generate(d, job(1, 120))
    net.tick(name_of(d))
    small = net.generate(p, job(2, 20), d)
    requests = d.ctx.core.queues.requests
    rows: list[int] = []
    net.on_message = lambda src, dst, m: rows.append(requests[key_of(local)].row) if isinstance(m, Grant) else None
    net.run()
    assert rows and rows[0], "it was granted while the older one had no memory"
    assert net.router.streams[local] == expected(job(1, 120))
    assert net.router.streams[small] == expected(job(2, 20))
    assert_clean(p, d)


# ---- whose message it is


def granted(net: Net, p: Node, d: Node) -> Grant:
    net.hold = lambda src, dst, m: isinstance(m, Ready | Prebuilt)
    net.generate(p, job(0, 70), d)
    net.run()
    (grant,) = net.messages(Grant)
    assert isinstance(grant, Grant)
    return grant


@pytest.mark.rule("H17")
def test_pages_and_records_count_for_their_lease_and_source_only() -> None:
    net, p, d = linked()
    grant = granted(net, p, d)
    record = next(action.message for _, _, action in net.kept if isinstance(action.message, Prebuilt))
    for source, lease in ((name_of(p), grant.lease + 1), ("p9@1", grant.lease)):
        net.to_node(name_of(d), msgspec.structs.replace(record, lease=lease, token=5), source)
    net.run()
    net.let_go()
    net.run()
    assert net.router.streams[grant.key] == expected(job(0, 70))
    assert_clean(p, d)


def test_installed_counts_for_its_own_lease_and_source_only() -> None:
    net, p, d = linked()
    grant = granted(net, p, d)
    net.to_node(name_of(p), Installed(grant.key, grant.lease + 1), name_of(d))
    net.to_node(name_of(p), Installed(grant.key, grant.lease), "d9@1")
    net.run()
    assert p.ctx.core.queues.requests, "its pages are pinned until the right peer has answered"
    net.let_go()
    net.run()
    assert net.router.streams[grant.key] == expected(job(0, 70))
    assert_clean(p, d)


@pytest.mark.rule("H17")
def test_leases_differ_in_every_life_of_a_node() -> None:
    leases = set()
    for epoch in (1, 2, 1 << 40):
        p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs(), epoch=epoch + 5)
        net = Net([p, d])
        for rid in range(3):
            net.generate(p, job(rid, 20), d)
        net.run()
        leases |= {message.lease for message in net.messages(Grant) if isinstance(message, Grant)}
    assert len(leases) == 9


@pytest.mark.rule("H25")
def test_pages_described_after_the_end_are_not_announced() -> None:
    """The prefill node's transfer stream is late: by then the pages may belong to somebody else."""
    net, p, d = linked()
    stream = HandDriven()
    core = p.ctx.core
    core.streams = core.engine.streams = replace(core.streams, transfer=stream)
    stream.open = False
    key: Key = net.generate(p, job(0, 70), d)
    net.run()
    assert stream.items and not net.messages(Ready)
    net.abort(p, key)
    net.run()
    stream.open = True
    stream.run()
    net.run()
    assert not net.messages(Ready)
    assert_clean(p, d)
    assert errors(d) == 0, "an abort that crosses with messages is no error"


@pytest.mark.rule("H38")
def test_siblings_behind_another_request_do_not_lock_both_nodes() -> None:
    """Siblings are offered late. One holds the only row here, over there the next request has the only one: it is
    granted and finds no row here, and the sibling is not granted for want of one there."""
    p = make_node("prefill", "p0", CoreKnobs(max_running=1))
    d = make_node("decode", "d0", CoreKnobs(max_running=1))
    net = Net([p, d])
    first, second = job(0, 40), job(1, 40)
    family = net.generate(p, first, d, num_sequences=4)
    other = net.generate(p, second, d)
    net.run()
    for index in range(4):
        assert net.router.streams[sibling(family, index)] == expected(first, index)
    assert net.router.streams[other] == expected(second)
    assert_clean(p, d)


def test_a_source_holds_no_more_than_its_share_of_the_pages() -> None:
    """Another source's hand-offs go on meanwhile, and the first one may be of any size."""
    kv = SimpleNamespace(page_size=16, allocator=SimpleNamespace(num_total=100))
    core = SimpleNamespace(kv=kv, settings=SchedSettings(page_size=16, max_context=4096))
    ctx: Any = SimpleNamespace(core=core, facts=SimpleNamespace(max_running=100))
    held: Any = SimpleNamespace(source="a", ranges=SimpleNamespace(end=70))

    def allowed(source: str, num_pages: int) -> bool:
        waiting: Any = SimpleNamespace(source=source, request=SimpleNamespace(num_tokens=16 * num_pages))
        return Shares(ctx, [held]).allow(waiting)

    assert allowed("a", 5) and not allowed("a", 6)
    assert allowed("b", 99)


# ---- siblings and their leader


ROUNDS = 10  # by then both are computed


@pytest.mark.parametrize("num_prompt", [40, 70])  # two chunks or three: a tick has two steps
@pytest.mark.parametrize("overlap", [True, False])
def test_a_leader_may_end_in_its_sibling_s_first_token_s_step(overlap: bool, num_prompt: int) -> None:
    """The sibling is offered then, and its first token is known, though its record has not been made: that token is the
    decode node's to repeat, not a part of what it continues (simulation seed 701)."""
    one = job(1, num_prompt, 12)
    for rounds in range(ROUNDS):
        p, d = pair(overlap=overlap)
        net = Net([p, d])
        key = net.generate(p, one, d, num_sequences=2)
        net.hold = lambda src, dst, message: isinstance(message, Grant)  # the leader is not installed meanwhile
        for _ in range(rounds):
            net.tick(name_of(p))
            net.tick(name_of(d))
        net.abort(p, key)
        net.tick(name_of(p))
        net.abort(d, key)
        net.let_go()
        net.run()
        other = sibling(key, 1)
        assert net.router.end(other).reason == "length", f"after {rounds} rounds: {net.router.end(other)}"
        assert net.router.streams[other] == expected(one, 1)
        assert_clean(p, d)


def test_a_peer_that_has_all_and_does_not_answer_is_given_up() -> None:
    net, p, d = linked()
    key = key_of(net.generate(p, job(1, 40, 12), d))
    net.hold = lambda src, dst, message: isinstance(message, Installed)
    for _ in range(ROUNDS):
        net.tick(name_of(p))
        net.tick(name_of(d))
    assert isinstance(p.side, PrefillSide) and key in p.side.inflight.granted
    net.at(p.ctx.facts.lease_s + 1)
    net.tick(name_of(p))
    assert key not in p.side.inflight.granted and key not in p.ctx.core.requests
