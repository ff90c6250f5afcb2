"""Transfers on a stream that the test drives by hand: what must wait for what, what is held and who is given up
meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from decode_node.groups_in import Fetched
from shared.core.sampling_params import SamplingParams
from shared.device.events import Event
from shared.node.loop.node import Node
from shared.wire.messages import Failed, Grant, Installed, Key, Prebuilt, Ready
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.cores.hand_driven import HandDriven
from tests.support.worlds.node_pair import LEASE_S, Net, assert_clean, expected, make_node, name_of

LONG = SamplingParams(max_tokens=40, temperature=0.0)


def job(rid: int, length: int = 70) -> Job:
    rng = random.Random(rid)
    return Job(rid, tuple(rng.randrange(95) for _ in range(length)), LONG, rid + 7)


def pair(**changes: object) -> tuple[Node, Node, HandDriven]:
    """The decode node's transfer stream is in the test's hand."""
    knobs = replace(CoreKnobs(chunk_size=32), **changes)
    p, d = make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)
    stream = HandDriven()
    core = d.ctx.core
    core.streams = core.engine.streams = replace(core.streams, transfer=stream)
    return p, d, stream


@pytest.mark.rule("H1")
def test_a_pull_waits_for_the_newest_launched_step() -> None:
    """A granted page may have belonged to a request whose last step still runs and writes into it."""
    p, d, stream = pair()
    net = Net([p, d])
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
    p, d, stream = pair()
    net = Net([p, d])
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
    p, d, stream = pair(num_pages=11, prefix_cache=False)
    net = Net([p, d])
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
    p, d, stream = pair()
    net = Net([p, d])
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
    p, d, stream = pair()
    net = Net([p, d])
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


def test_a_source_that_says_nothing_for_a_lease_is_given_up() -> None:
    p, d, _ = pair()
    net = Net([p, d])
    net.drop = lambda src, dst, message: isinstance(message, Ready | Prebuilt)
    key = net.generate(p, job(0), d)
    net.run()
    net.at(LEASE_S)
    net.tick(name_of(d))
    assert not net.router.ends[key], "a whole lease"
    net.at(1.0)
    net.tick(name_of(d))
    assert "was silent about it" in net.router.end(key).error_message
    net.run()
    assert_clean(p, d)


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


# ---- the prefill node's half


def granted_and_not_begun(**changes: object) -> tuple[Net, Node, Node, HandDriven, Key]:
    """The prefill node has a grant, computes nothing until `go_on`, and its transfer stream is in the test's hand."""
    knobs = replace(CoreKnobs(chunk_size=32), **changes)
    p, d = make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)
    stream, core = HandDriven(), p.ctx.core
    core.streams = core.engine.streams = replace(core.streams, transfer=stream)
    core.loop.step = lambda block=False: False  # type: ignore[method-assign]
    net = Net([p, d])
    key = net.generate(p, job(0), d)
    net.run()
    assert len(net.messages(Grant)) == 1 and p.side.inflight.granted
    return net, p, d, stream, key


def go_on(node: Node) -> None:
    del node.ctx.core.loop.step


def test_layers_go_ahead_of_each_step_begun_after_the_grant() -> None:
    net, p, d, _, key = granted_and_not_begun(layer_ends=(1,))
    go_on(p)
    net.run()
    ahead = [message for message in net.messages(Ready) if message.num_layers == 1]
    pages = [page for message in ahead for page in range(message.first_page, message.first_page + len(message.pages))]
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert net.router.streams[key] == expected(job(0))
    assert_clean(p, d)


def test_the_record_is_a_sign_of_life_while_pages_are_described() -> None:
    """The next one, that it is not forgotten, is due a quarter of a lease later."""
    net, p, d, stream, key = granted_and_not_begun()
    stream.open = False
    net.at(0.2 * LEASE_S)
    go_on(p)
    net.run()
    assert net.messages(Prebuilt) and stream.items
    net.at(0.2 * LEASE_S)
    net.run()
    assert not net.messages(Ready), "0.2 of a lease after the record"
    net.at(0.1 * LEASE_S)
    net.run()
    assert [message.pages for message in net.messages(Ready)] == [[]]
    stream.open = True
    stream.run()
    net.run()
    assert net.router.streams[key] == expected(job(0))
    assert_clean(p, d)


# ---- what goes wrong


def test_a_pull_that_raises_leaves_the_stream_alive() -> None:
    p, d, stream = pair()
    net = Net([p, d])
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
