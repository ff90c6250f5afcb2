"""A decode node that reads nothing: the prefill node's blocks are not all its, and what waits goes on when it reads."""

from __future__ import annotations

import random

import pytest

from prefill_node.side import PrefillSide
from prefill_node.unread import SHARES
from shared.core.sampling_params import SamplingParams
from shared.node.node import Node
from shared.transfer.frames import FrameSender
from shared.transfer.host_bytes import PinnedReader
from shared.transfer.interface import READY_BYTES
from shared.wire.messages import Ready
from tests.support.core_rig import CoreKnobs, Job
from tests.support.node_pair import Net, assert_clean, expected, make_node, name_of
from tests.support.virtual_gpu.device import make_device

SHORT = SamplingParams(max_tokens=4, temperature=0.0)
KNOBS = CoreKnobs(chunk_size=32, prefix_cache=False)


def job(rid: int, length: int = 150) -> Job:
    rng = random.Random(rid)
    return Job(rid, tuple(rng.randrange(95) for _ in range(length)), SHORT, rid + 7)


def lending_node(num_blocks: int) -> Node:
    """Its pages are on a CPU and travel in blocks all the same. A block too many is an error at once."""
    node = make_node("prefill", "p0", KNOBS)
    sender = FrameSender(node.ctx.core.pool)
    reader = PinnedReader(node.ctx.core.pool, make_device(), most_bytes=num_blocks * READY_BYTES, patience_s=0.0)
    sender._reader, sender.num_blocks = reader, reader.num_blocks
    node.ctx.wake = lambda: None
    node.side = PrefillSide(node.ctx, {"zmq": sender})
    return node


@pytest.mark.parametrize("per_peer", [1, 2])
def test_a_peer_that_reads_nothing_leaves_the_others_their_blocks(per_peer: int) -> None:
    p, slow, good = (
        lending_node(SHARES * per_peer),
        make_node("decode", "d0", KNOBS),
        make_node("decode", "d1", KNOBS, 2),
    )
    net = Net([p, slow, good])
    net.hold = lambda src, dst, message: isinstance(message, Ready) and bool(message.pages) and dst == name_of(slow)
    first = [net.generate(p, job(rid), slow) for rid in (0, 1)]
    net.run()
    assert len(net.kept) == per_peer, "the others wait for these to be read"
    others = [net.generate(p, job(rid), good) for rid in (2, 3)]
    net.run()
    assert [net.router.streams[key] for key in others] == [expected(job(rid)) for rid in (2, 3)]
    assert len(net.kept) == per_peer
    net.hold = lambda src, dst, message: False
    net.release_held()
    net.run()
    assert [net.router.streams[key] for key in first] == [expected(job(rid)) for rid in (0, 1)]
    assert_clean(p, slow, good)
    assert not p.side.inflight._unread._num, "all was read"


def test_what_waits_for_a_request_that_has_ended_is_forgotten() -> None:
    p, slow = lending_node(SHARES), make_node("decode", "d0", KNOBS)
    net = Net([p, slow])
    net.hold = lambda src, dst, message: isinstance(message, Ready) and bool(message.pages)
    key = net.generate(p, job(0), slow)
    net.run()
    assert len(net.kept) == 1 and p.side.inflight._final
    net.abort(p, key)
    net.run()
    assert not p.side.inflight._final
    net.kept.clear()
    net.run()
    assert not p.side.inflight._unread._num, "its connection was closed, and the frames are gone with it"
    assert_clean(p, slow)
