"""Transfers on a stream that the test drives by hand: what must wait for what, what is held and who is given up
meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from decode_node.groups_in import Fetched
from decode_node.handoff_in import HandoffIn
from decode_node.side import DecodeSide
from shared.core.sampling_params import SamplingParams
from shared.device.events import Event
from shared.node.loop.node import Node
from shared.node.records.page_ranges import PageRanges
from shared.wire.messages import Failed, Grant, Installed, Key, Prebuilt, Ready
from shared.wire.peers import peer_name
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.cores.hand_driven import HandDriven
from tests.support.worlds.node_pair import LEASE_S, Net, assert_clean, expected, make_node, name_of

LONG = SamplingParams(max_tokens=40, temperature=0.0)


def job(rid: int, length: int = 70) -> Job:
    rng = random.Random(rid)
    return Job(rid, tuple(rng.randrange(95) for _ in range(length)), LONG, rid + 7)


def linked(**changes: object) -> tuple[Net, Node, Node, HandDriven]:
    """The decode node's transfer stream is in the test's hand."""
    knobs = replace(CoreKnobs(chunk_size=32), **changes)
    p, d = make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)
    stream = HandDriven()
    core = d.ctx.core
    core.streams = core.engine.streams = replace(core.streams, transfer=stream)
    return Net([p, d]), p, d, stream


@pytest.mark.rule("H1")
def test_a_pull_waits_for_the_newest_launched_step() -> None:
    """A granted page may have belonged to a request whose last step still runs and writes into it."""
    net, p, d, stream = linked()
    key = net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Grant)))
    running = Event("last step of somebody else")
    d.ctx.core.engine.last_done = running
    net.run()
    assert len([m for m in net.messages(Ready) if m.pages]) == 3
    assert not stream.log, "a pull ran beside a step that may write the same pages"
    running.fire()
    stream.run()
    assert stream.log == ["pull"] * 3
    net.run()
    assert net.router.streams[key] == expected(job(0))
    assert_clean(p, d)


@pytest.mark.rule("H34")
@pytest.mark.parametrize("how", ["abort", "deadline", "death", "bad record"])
def test_pages_are_held_until_the_pull_into_them_is_over(how: str) -> None:
    net, p, d, stream = linked()
    key = net.generate(p, job(0), d, remaining_ms=5_000)
    stream.open = False
    net.hold = lambda src, dst, message: isinstance(message, Prebuilt)
    net.run()
    assert stream.items and d.ctx.core.kv.gauges()["granted"] == 5
    end_it(net, p, d, key, how)
    net.run()
    assert d.ctx.core.kv.gauges()["held"] == 5, "a pull still writes into them"
    assert not d.ctx.core.queues.requests and not d.idle
    if how in ("abort", "deadline"):
        assert net.messages(Failed), "the prefill node need not wait for the pull"
    stream.open = True
    stream.run()
    net.run()
    assert d.ctx.core.kv.gauges()["held"] == 0
    net.at(1.0)
    net.run()
    assert len(net.router.heartbeats["d0"].load.observations["time_to_free_seconds"]) >= 1
    assert_clean(*(node for node in (p, d) if name_of(node) not in net.dead))


def end_it(net: Net, p: Node, d: Node, key: Key, how: str) -> None:
    if how == "abort":
        net.abort(d, key)
    elif how == "deadline":
        net.at(6.0)
    elif how == "death":
        net.kill(p)
    else:
        lease = net.messages(Grant)[0].lease
        net.to_node(name_of(d), Prebuilt(key, lease, 1, [], 3, 0, b""), name_of(p))


@pytest.mark.rule("H39")
def test_held_pages_are_not_given_to_the_next_request() -> None:
    """The row and pages of an aborted hand-off come back only after its pull; the next one waits for them."""
    net, p, d, stream = linked(num_pages=11, prefix_cache=False)
    stream.open = False
    first = net.generate(p, job(0), d)
    net.run()
    net.abort(d, first)
    second = net.generate(p, job(1), d)
    net.run()
    grants = [message.key for message in net.messages(Grant)]
    held = {int(page) for page in held_pages(d)}
    assert held
    for request in d.ctx.core.queues.requests.values():
        assert not held & {int(page) for page in d.ctx.core.kv.rows.pages_of(request.row)}
    stream.open = True
    stream.run()
    net.run()
    assert grants[0] == first
    assert net.router.streams[second] == expected(job(1))
    assert_clean(p, d)


def held_pages(node: Node) -> list[int]:
    kv = node.ctx.core.kv
    return [page for row in kv.rows.rows_in_use() if kv.tag(row) == "held" for page in kv.rows.pages_of(row)]


@pytest.mark.rule("H30")
def test_a_retracted_grant_runs_here_and_frees_the_prefill_node() -> None:
    net, p, d, stream = linked()
    stream.open = False
    key = net.generate(p, job(0), d)
    net.run()
    scheduler = d.ctx.core.scheduler
    (request,) = scheduler.queues.granted.values()
    scheduler.queues.retract(request)
    net.run(until=lambda: bool(net.messages(Installed)))
    assert d.ctx.core.kv.gauges()["held"] == 5
    net.run()
    assert net.router.streams[key] == expected(job(0)), "prefilled here, beside the pull that is still open"
    assert not p.ctx.core.queues.requests
    stream.open = True
    stream.run()
    net.run()
    assert [end.reason for end in net.router.ends[key]] == ["length"]
    assert_clean(p, d)


def test_a_complete_hand_off_survives_the_death_of_its_source() -> None:
    """All pages are claimed and the record is here: the pull in flight needs nobody any more, however long it takes."""
    net, p, d, stream = linked()
    stream.open = False
    key = net.generate(p, job(0), d)
    net.run()
    assert net.messages(Prebuilt)
    net.kill(p)
    net.at(2 * LEASE_S)
    net.run()
    assert not net.router.ends[key] and d.ctx.core.queues.granted
    stream.open = True
    stream.run()
    net.run()
    assert net.router.streams[key] == expected(job(0))
    assert_clean(d)


def test_a_decode_node_gives_up_a_hand_off_that_brings_nothing() -> None:
    """Its prefill node lives, and its loop hangs: no word of it ends the hand-off, nor does its connection close."""
    net, p, d, _ = linked()
    net.drop = lambda src, dst, message: isinstance(message, Prebuilt | Ready)
    net.generate(p, job(1, 40), d)
    net.run(until=lambda: bool(d.ctx.core.queues.granted))
    net.at(LEASE_S + 1)
    net.tick(name_of(d))
    net.tick(name_of(d))
    assert d.idle and len(net.messages(Failed)) == 1
    assert d.ctx.core.kv.rows.num_free == d.ctx.core.kv.rows.num_total


def test_pages_of_an_ended_request_hold_back_no_later_ones() -> None:
    p, d = (make_node(role, role[0], CoreKnobs(), transport="gloo") for role in ("prefill", "decode"))
    net, groups, fetched = Net([p, d]), d.side.transfers.groups, list[Fetched]()
    poll = groups.poll
    groups.poll = lambda: fetched.extend(poll()) or []
    first, second = (net.generate(p, job(rid, 10), d) for rid in (0, 1))
    net.run()
    assert [one.handoff.key.rid for one in fetched] == [first.rid, second.rid]
    net.abort(d, first)
    net.run()
    groups.poll = lambda: [*poll(), *(fetched.pop(0) for _ in range(len(fetched)))]
    net.run()
    assert net.router.streams[second] == expected(job(1, 10))
    assert_clean(p, d)


# ---- what goes wrong


def test_a_pull_that_raises_leaves_the_stream_alive() -> None:
    net, p, d, stream = linked()
    receiver = d.side.transfers.copies.receivers["zmq"]
    plain = receiver.pull
    calls = iter([OSError("disk on fire")])

    def pull(*args: object) -> None:
        for error in calls:
            raise error
        plain(*args)

    receiver.pull = pull
    bad, good = net.generate(p, job(0), d), net.generate(p, job(1), d)
    net.run()
    assert {end.error_code for end in net.router.ends[bad]} == {"handoff_failed"}
    assert net.router.streams[good] == expected(job(1))
    assert_clean(p, d)


def handoff_of(source: str) -> HandoffIn:
    request = Job(1, (1, 2, 3), SamplingParams(max_tokens=4), 7).request()
    return HandoffIn(request, source, "gloo", 1, 1, PageRanges(np.ones(1, np.int32), 0), 0.0, 0.0, False)


def test_a_revoked_hand_off_leaves_nothing_behind() -> None:
    """A prefill node has another name in each of its lives: each left a key behind with its first revoked hand-off."""
    side = make_node("decode", "d0", CoreKnobs()).side
    assert isinstance(side, DecodeSide)
    for life in range(1, 100):
        side.transfers.groups.forget(handoff_of(peer_name("p0", life)))
    assert not side.transfers.groups._waiting
