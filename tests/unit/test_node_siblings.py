"""A sibling that waits behind its leader, and a leader that ends in any moment of its life."""

from __future__ import annotations

import pytest

from shared.wire.messages import Grant
from tests.support.core_rig import CoreKnobs
from tests.support.node_pair import Net, assert_clean, expected, make_node, name_of, sibling
from tests.support.scripted_core import job

ROUNDS = 10  # by then both are computed


@pytest.mark.parametrize("num_prompt", [40, 70])  # two chunks or three: a tick has two steps
@pytest.mark.parametrize("overlap", [True, False])
def test_a_leader_may_end_in_the_step_that_brings_its_sibling_s_first_token(overlap: bool, num_prompt: int) -> None:
    """The sibling is offered then, and its first token is known, though its record has not been made: that token is the
    decode node's to repeat, not a part of what it continues (simulation seed 701)."""
    one = job(1, num_prompt, 12)
    for rounds in range(ROUNDS):
        knobs = CoreKnobs(chunk_size=32, overlap=overlap)
        p, d = make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)
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
