"""Rules that another one would make up for in time, each with the other out of the way: the long run of the simulation
does not see them missing, because nothing wrong comes of it, only work for nobody or memory that comes back late."""

from __future__ import annotations

from shared.wire.messages import Failed, Prebuilt, Ready
from tests.support.cores.core_rig import CoreKnobs
from tests.support.cores.scripted_core import job
from tests.support.worlds.node_pair import LEASE_S, Net, make_node, name_of
from tests.support.worlds.router_rig import RouterRig, aborts


def test_a_decode_node_gives_up_a_hand_off_that_brings_nothing() -> None:
    """Its prefill node lives, and its loop hangs: no word of it ends the hand-off, nor does its connection close."""
    p, d = make_node("prefill", "p0", CoreKnobs(chunk_size=32)), make_node("decode", "d0", CoreKnobs())
    net = Net([p, d])
    net.drop = lambda src, dst, message: isinstance(message, Prebuilt | Ready)
    net.generate(p, job(1, 40, 12), d)
    net.run(until=lambda: bool(d.ctx.core.queues.granted))
    net.at(LEASE_S + 1)
    net.tick(name_of(d))
    net.tick(name_of(d))
    assert d.idle and len(net.messages(Failed)) == 1
    assert d.ctx.core.kv.rows.num_free == d.ctx.core.kv.rows.num_total


def test_the_nodes_of_an_attempt_are_told_when_it_is_over() -> None:
    """Not when they speak of it again: a prefill node may have it in its queue for long."""
    rig = RouterRig(max_attempts=3)
    prefill, decode, other = rig.join("prefill", "p"), rig.join("decode", "d"), rig.join("decode", "e")
    (generate,) = rig.open()
    target, spare = (decode, other) if generate.decode_node == "d" else (other, decode)
    effects = rig.dispatcher.node_lost(target, "test", rig.now)
    assert (prefill.peer, 0, True) in aborts(effects)
    assert spare.ours.open_sequences == 1
