"""Pulls on a transfer stream that the test drives by hand: what must wait for what, and what is held meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shared.core.sampling_params import SamplingParams
from shared.device.events import Event
from shared.node.node import Node
from shared.wire.messages import Failed, Grant, Installed, Key, Prebuilt, Ready
from tests.support.core_rig import CoreKnobs, Job
from tests.support.hand_driven import HandDriven
from tests.support.node_pair import Net, assert_clean, expected, make_node, name_of

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
    assert not d.ctx.core.scheduler.requests
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
    for request in d.ctx.core.scheduler.requests.values():
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
def test_a_retracted_grant_goes_on_here_and_frees_the_prefill_node() -> None:
    p, d, stream = pair()
    net = Net([p, d])
    stream.open = False
    key = net.generate(p, job(0), d)
    net.run()
    scheduler = d.ctx.core.scheduler
    (request,) = scheduler.granted.values()
    scheduler.retract(request)
    net.run(until=lambda: bool(net.messages(Installed)))
    assert d.ctx.core.kv.gauges()["held"] == 5
    net.run()
    assert net.router.streams[key] == expected(job(0)), "prefilled here, beside the pull that is still open"
    assert not p.ctx.core.scheduler.requests
    stream.open = True
    stream.run()
    net.run()
    assert [end.reason for end in net.router.ends[key]] == ["length"]
    assert_clean(p, d)


def test_a_pull_that_raises_leaves_the_stream_alive() -> None:
    p, d, stream = pair()
    net = Net([p, d])
    receiver = d.side.transfers._receivers["zmq"]
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


def test_what_arrived_completely_survives_the_death_of_its_source() -> None:
    """All pages are claimed and the record is here: the pull in flight needs nobody any more."""
    p, d, stream = pair()
    net = Net([p, d])
    stream.open = False
    key = net.generate(p, job(0), d)
    net.run()
    assert net.messages(Prebuilt)
    net.kill(p)
    net.run()
    stream.open = True
    stream.run()
    net.run()
    assert net.router.streams[key] == expected(job(0))
    assert_clean(d)
