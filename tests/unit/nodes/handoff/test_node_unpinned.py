"""A computed prompt without a grant gave its memory away, and is granted at some moment of its second life."""

from __future__ import annotations

import pytest

from prefill_node.handoff_out import HandoffOut
from prefill_node.side import PrefillSide
from shared.node.loop.node import Node
from shared.wire.codec import key_of
from shared.wire.messages import Grant, Key
from tests.support.worlds.faulty_pair import ends_of, job, linked
from tests.support.worlds.node_pair import Net, assert_clean, expected, name_of

LENGTH = 100  # 20 chunks, 10 ticks, 7 pages: memory for one prompt only
MAX_ROUNDS = 60  # by then it has been computed again


@pytest.mark.parametrize("layer_ends", [(), (1,)])
def test_a_late_grant_finds_only_what_the_second_life_computed(layer_ends: tuple[int, ...]) -> None:
    """Nothing of the first life may go out: not its record, no layers, and no page that is not full again."""
    computed = [granted_after(rounds, layer_ends) for rounds in range(MAX_ROUNDS)]
    assert computed[0] == 0 and computed[-1] == LENGTH, "from its beginning to its end"
    assert any(num_tokens % 16 for num_tokens in computed[1:-1]), "in the middle of a page too"


def granted_after(rounds: int, layer_ends: tuple[int, ...]) -> int:
    """Return how many tokens were computed again when the grant came."""
    net, p, d = linked(num_pages=12, chunk_size=5, prefix_cache=False, layer_ends=layer_ends)
    net.hold = lambda source, target, message: isinstance(message, Grant)
    one = job(1, LENGTH)
    key = net.generate(p, one, d)
    net.run()
    give_way(net, p, key)
    for _ in range(rounds):
        net.tick(name_of(p))
    num_tokens = handoff_of(p, key).num_final_tokens
    net.hold = lambda source, target, message: False
    net.release_held()
    net.run()
    assert ends_of(net, key) == [("length", "")], f"granted after {rounds} rounds"
    assert net.router.streams[key] == expected(one)
    assert_clean(p, d)
    return num_tokens


def give_way(net: Net, p: Node, key: Key) -> None:
    """To a prompt that stays at the prefill node."""
    handoff = handoff_of(p, key)
    assert handoff.record is not None
    net.generate(p, job(2, LENGTH), None)
    net.run(until=lambda: handoff.request.incarnation == 1)


def handoff_of(p: Node, key: Key) -> HandoffOut:
    assert isinstance(p.side, PrefillSide)
    handoff = p.side.bootstrap.find_handoff(key_of(key))
    assert handoff is not None
    return handoff
