"""A node tells its routers whose prompts it computes, before the step that does so can end it."""

from __future__ import annotations

from shared.node.records.mail import Outgoing
from shared.wire.messages import Begun, Message
from tests.support.cores.core_rig import CoreKnobs
from tests.support.worlds.faulty_pair import job, pair
from tests.support.worlds.node_pair import Net, assert_clean, make_node, name_of


def test_the_word_leaves_with_the_round_that_launches_the_step() -> None:
    p, _ = pair()
    net = Net([p])
    net.tick(name_of(p))
    key = net.generate(p, job())
    sent: list[Message] = []
    for inbound in [net.inboxes[name_of(p)].popleft()]:
        sent += [action.message for action in p.tick([inbound], net.now) if isinstance(action, Outgoing)]
    assert Begun("p0", 1, [key]) in sent and p.ctx.core.engine.leases
    net.run()


def test_who_waits_for_memory_has_not_begun() -> None:
    p = make_node("prefill", "p0", CoreKnobs(chunk_size=32, num_pages=10, prefix_cache=False))
    net = Net([p])
    first, second = net.generate(p, job(0, 100)), net.generate(p, job(1, 100))
    net.run(until=lambda: bool(net.router.streams[first]))
    assert net.router.begun == [("p0", first)]
    net.run()
    assert net.router.begun == [("p0", first), ("p0", second)], "once each"
    assert_clean(p)
