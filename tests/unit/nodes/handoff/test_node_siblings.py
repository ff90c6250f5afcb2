"""A sibling that waits behind its leader, and a leader that ends in any moment of its life."""

from __future__ import annotations

import pytest

from prefill_node.side import PrefillSide
from shared.sched.steps.events import ChunkReady
from shared.wire.codec import key_of
from shared.wire.messages import Grant, Installed, Offer
from tests.support.cores.scripted_core import job
from tests.support.worlds.faulty_pair import pair
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


def test_without_a_prefix_cache_siblings_wait_for_nobody() -> None:
    """There are no pages of the leader's to share."""
    one, (p, d) = job(1, 40, 12), pair(prefix_cache=False)
    net = Net([p, d])
    key = net.generate(p, one, d, num_sequences=3)
    net.tick(name_of(p))
    assert len(net.messages(Offer)) == 3
    net.run()
    for index in range(3):
        assert net.router.streams[sibling(key, index)] == expected(one, index)
    assert_clean(p, d)


def test_a_peer_that_has_all_and_does_not_answer_is_given_up() -> None:
    p, d = pair()
    net = Net([p, d])
    key = key_of(net.generate(p, job(1, 40, 12), d))
    net.hold = lambda src, dst, message: isinstance(message, Installed)
    for _ in range(ROUNDS):
        net.tick(name_of(p))
        net.tick(name_of(d))
    assert isinstance(p.side, PrefillSide) and key in p.side.inflight.granted
    net.at(p.ctx.facts.lease_s + 1)
    net.tick(name_of(p))
    assert key not in p.side.inflight.granted and key not in p.ctx.core.requests


def test_progress_after_giving_memory_away_counts_for_nothing() -> None:
    p, d = pair()
    net = Net([p, d])
    key = net.generate(p, job(1, 70, 12), d)
    net.tick(name_of(p))
    assert isinstance(p.side, PrefillSide)
    handoff = p.side.bootstrap.find_handoff(key_of(key))
    assert handoff is not None
    row, handoff.request.row = handoff.request.row, 0
    p.side._progressed(ChunkReady(handoff.request, 32), net.now)
    assert handoff.num_final_tokens == 0
    handoff.request.row = row
    p.side._progressed(ChunkReady(handoff.request, 32), net.now)
    assert handoff.num_final_tokens == 32
