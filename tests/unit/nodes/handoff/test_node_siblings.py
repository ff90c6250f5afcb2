"""A sibling that waits behind its leader, and a leader that ends in any moment of its life."""

from __future__ import annotations

import pytest

from prefill_node.side import PrefillSide
from shared.wire.codec import key_of
from shared.wire.messages import Grant, Installed
from tests.support.cores.scripted_core import job
from tests.support.worlds.faulty_pair import linked, pair
from tests.support.worlds.node_pair import Net, assert_clean, expected, name_of, sibling

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
        net.hold = lambda src, dst, message: False
        net.release_held()
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
