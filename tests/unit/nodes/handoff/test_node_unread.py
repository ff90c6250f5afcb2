"""A decode node that reads nothing: the prefill node's blocks are not all its, and what waits goes on when it reads."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from prefill_node.side import PrefillSide
from prefill_node.unread import SHARES
from shared.core.errors import HandoffFailed
from shared.core.sampling_params import SamplingParams
from shared.device.cpu import do_nothing
from shared.node.loop.node import Node
from shared.transfer.frames import FrameSender
from shared.transfer.host_bytes import PinnedReader
from shared.transfer.interface import READY_BYTES
from shared.wire.messages import FramesTaken, Key, Ready
from shared.wire.peers import Received
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.cores.hand_driven import HandDriven
from tests.support.virtual_gpu.device import make_device
from tests.support.worlds.node_pair import LEASE_S, Net, assert_clean, expected, make_node, name_of

SHORT = SamplingParams(max_tokens=4, temperature=0.0)
KNOBS = CoreKnobs(chunk_size=32, prefix_cache=False)
NODES = (("prefill", "p0"), ("decode", "d0"), ("decode", "d1"))


def job(rid: int, length: int = 150) -> Job:
    rng = random.Random(rid)
    return Job(rid, tuple(rng.randrange(95) for _ in range(length)), SHORT, rid + 7)


def lending_node(num_blocks: int, wake: Callable[[], None] = do_nothing) -> Node:
    """Its pages are on a CPU and travel in blocks all the same. A block too many is an error at once."""
    node = make_node("prefill", "p0", KNOBS)
    sender = FrameSender(node.ctx.core.pool)
    reader = PinnedReader(node.ctx.core.pool, make_device(), most_bytes=num_blocks * READY_BYTES, patience_s=0.0)
    sender._reader, sender.num_blocks = reader, reader.num_blocks
    node.ctx.wake = wake
    node.side = PrefillSide(node.ctx, {"zmq": sender})
    return node


def hold_pages(net: Net, *nodes: Node) -> None:
    """They read nothing more of pages."""
    names = {name_of(node) for node in nodes}
    net.hold = lambda src, dst, message: isinstance(message, Ready) and bool(message.pages) and dst in names


def lending_to_slow(wake: Callable[[], None] = do_nothing) -> tuple[Net, Node, Node]:
    """With a decode node that reads nothing of pages."""
    p, slow = lending_node(SHARES, wake), make_node("decode", "d0", KNOBS)
    net = Net([p, slow])
    hold_pages(net, slow)
    return net, p, slow


@pytest.mark.parametrize("per_peer", [1, 2])
def test_a_peer_that_reads_nothing_leaves_others_their_blocks(per_peer: int) -> None:
    p, slow, good = (
        lending_node(SHARES * per_peer),
        make_node("decode", "d0", KNOBS),
        make_node("decode", "d1", KNOBS, 2),
    )
    net = Net([p, slow, good])
    hold_pages(net, slow)
    first = [net.generate(p, job(rid), slow) for rid in (0, 1)]
    net.run()
    assert len(net.kept) == per_peer, "the others wait for these to be read"
    others = [net.generate(p, job(rid), good) for rid in (2, 3)]
    net.run()
    assert [net.router.streams[key] for key in others] == [expected(job(rid)) for rid in (2, 3)]
    assert len(net.kept) == per_peer
    net.let_go()
    net.run()
    assert [net.router.streams[key] for key in first] == [expected(job(rid)) for rid in (0, 1)]
    assert_clean(p, slow, good)
    assert not p.side.inflight.queue._unread._num, "all was read"


def test_what_waits_for_a_request_that_has_ended_is_forgotten() -> None:
    net, p, slow = lending_to_slow()
    key = net.generate(p, job(0), slow)
    net.run()
    assert len(net.kept) == 1 and len(p.side.inflight.queue)
    net.abort(p, key)
    net.run()
    assert not len(p.side.inflight.queue)
    net.kept.clear()
    net.run()
    assert not p.side.inflight.queue._unread._num, "its connection was closed, and the frames are gone with it"
    assert_clean(p, slow)


def test_peers_holding_all_blocks_never_stop_the_transfer_thread() -> None:
    """One more than there are shares: what is described for it would block the thread, or be an error as here."""
    p = lending_node(SHARES)
    slow = [make_node("decode", f"d{index}", KNOBS, index) for index in range(1, SHARES + 1)]
    good = make_node("decode", "d9", KNOBS, 9)
    net = Net([p, *slow, good])
    hold_pages(net, *slow)
    keys = [net.generate(p, job(rid), peer) for rid, peer in enumerate(slow)]
    net.run()
    assert len(net.kept) == SHARES
    keys.append(net.generate(p, job(SHARES), good))
    net.run()
    assert len(p.side.inflight.queue) and not any(net.router.ends[key] for key in keys)
    net.let_go()
    net.run()
    assert [net.router.streams[key] for key in keys] == [expected(job(rid)) for rid in range(len(keys))]
    assert_clean(p, *slow, good)


def test_a_peer_that_reads_wakes_the_loop() -> None:
    """Nothing else may happen on the node for long."""
    wakes: list[None] = []
    net, p, slow = lending_to_slow(lambda: wakes.append(None))
    net.generate(p, job(0), slow)
    net.run()
    num_wakes = len(wakes)
    assert len(net.kept) == 1
    net.kept.clear()
    assert len(wakes) == num_wakes + 1
    net.run()
    assert len(net.kept) == 1, "what waited was sent"


@pytest.mark.parametrize("is_lending", [True, False])
def test_a_peer_that_reads_nothing_for_a_lease_is_given_up(is_lending: bool) -> None:
    """Page sets may wait for it, or all have been sent."""
    p = lending_node(SHARES) if is_lending else make_node("prefill", "p0", KNOBS)
    slow = make_node("decode", "d0", KNOBS)
    net = Net([p, slow])
    hold_pages(net, slow)
    keys = [net.generate(p, job(rid, 100), slow) for rid in (0, 1)]
    net.run()
    assert bool(len(p.side.inflight.queue)) is is_lending
    net.at(LEASE_S * 0.9)
    net.run()
    assert len(p.side.inflight.granted) == 2, "it has a lease"
    net.at(LEASE_S * 0.2)
    net.run()
    assert not p.side.inflight.granted and not len(p.side.inflight.queue)
    assert all(net.router.ends[key] for key in keys)


def test_a_peer_that_reads_slowly_is_not_given_up() -> None:
    """Each block that it reads makes room for a set, which is a sign of life."""
    net, p, slow = lending_to_slow()
    key = net.generate(p, job(0), slow)
    net.run()
    num_turns = 0
    while net.kept:
        net.at(LEASE_S * 0.7)
        net.release_held()
        net.run()
        num_turns += 1
    assert num_turns > 1 and net.router.streams[key] == expected(job(0))
    assert all(message.pages for message in net.messages(Ready)), "no need to say that the prefill node lives"
    assert_clean(p, slow)


# ---- frames on their way


def frames_said(net: Net, key: Key) -> int:
    return sum(bool(message.pages) for message in net.messages(Ready) if message.key == key)


def test_few_pages_are_on_the_way_to_a_slow_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its watch's bound a decode node that is merely slow would take pages for a flood."""
    p, slow, good = (make_node(role, name, KNOBS, index) for index, (role, name) in enumerate(NODES))
    monkeypatch.setattr("prefill_node.unread.UNTAKEN_BYTES", 5 * p.ctx.core.pool.page_bytes)
    net = Net([p, slow, good])
    hold_pages(net, slow)
    keys = [net.generate(p, job(rid), slow) for rid in range(3)]
    keys.append(net.generate(p, job(3), good))
    net.run()
    assert [len(action.message.pages) for _, _, action in net.kept] == [2, 2], "a third set of two would be six pages"
    assert net.router.streams[keys[3]] == expected(job(3)), "another node's pages don't wait"
    net.let_go()
    net.run()
    assert [net.router.streams[key] for key in keys] == [expected(job(rid)) for rid in range(4)]
    assert_clean(p, slow, good)


def test_frames_count_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Ready goes out when the one before was taken, although no page is copied: a long step would hold it up."""
    monkeypatch.setattr("prefill_node.unread.UNTAKEN_BYTES", 1)
    p, d = make_node("prefill", "p0", KNOBS), make_node("decode", "d0", KNOBS)
    stream, core = HandDriven(), d.ctx.core
    stream.open = False
    core.streams = core.engine.streams = replace(core.streams, transfer=stream)
    net = Net([p, d])
    net.hold = lambda src, dst, message: isinstance(message, FramesTaken)
    key = net.generate(p, job(0), d)
    for number in range(1, 6):
        net.run()
        assert frames_said(net, key) == number and len(net.kept) == 1
        net.release_held()
    net.hold = lambda src, dst, message: False
    while not net.router.ends[key]:
        stream.run()
        net.run()
    assert net.router.streams[key] == expected(job(0)) and not p.side.inflight.granted
    assert_clean(p, d)


def test_a_large_page_set_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones of the same peer would take the room that it waits for, for ever."""
    knobs = CoreKnobs(chunk_size=32)
    p, other, d = (make_node(role, name, knobs, index) for index, (role, name) in enumerate(NODES))
    net = Net([p, other, d])
    net.run_until_ended([net.generate(p, job(0, 100), other)])  # its six pages are cached: they go out as one set
    net.run()
    monkeypatch.setattr("prefill_node.unread.UNTAKEN_BYTES", 6 * p.ctx.core.pool.page_bytes)
    hold_pages(net, d)
    jobs = [job(1, 17), replace(job(0, 100), rid=7), job(2, 17)]
    keys = []
    for one in jobs:
        keys.append(net.generate(p, one, d))
        net.run()
    assert {action.message.key for _, _, action in net.kept} == {keys[0]}, "the second does not fit, so the third waits"
    net.let_go()
    net.run_until_ended(keys)
    assert [net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    net.run()
    assert_clean(p, other, d)


@pytest.mark.parametrize("change", ["longer", "one more", "to a transport without frames"])
def test_frames_that_do_not_fit_are_not_kept(change: str) -> None:
    """The defect: they were acknowledged, and kept until the pull, which a step in flight delays."""
    transport = "shm" if change == "to a transport without frames" else "zmq"
    p, d = (make_node(role, name, KNOBS, transport=transport) for role, name in NODES[:2])
    stream, core = HandDriven(), d.ctx.core
    stream.open = False
    core.streams = core.engine.streams = replace(core.streams, transfer=stream)
    net = Net([p, d])
    net.hold = lambda src, dst, message: isinstance(message, Ready)
    key = net.generate(p, job(0), d)
    net.run()
    _, _, held = net.kept[0]
    frames = {
        "longer": [bytes(8 << 20) for _ in held.frames],
        "one more": [*held.frames, held.frames[0] if held.frames else b""],
        "to a transport without frames": [bytes(8 << 20)],
    }
    net.inboxes[name_of(d)].append(Received(name_of(p), held.message, tuple(map(bytes, frames[change]))))
    net.run()
    assert net.router.end(key).error_code == HandoffFailed.code
    assert not net.messages(FramesTaken) and not d.side.transfers.open and not d.side.transfers.copies.held
    assert_clean(d)
    p.ctx.core.close()
