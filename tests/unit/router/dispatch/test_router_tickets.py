"""The ticket that a router gives with each request that is handed over, and the keys that nodes get to know it by."""

from __future__ import annotations

from router.requests.tickets import Tickets, deadline_ms
from shared.wire.codec import key_of
from shared.wire.ranges import MAX_MS
from shared.wire.tickets import is_genuine
from tests.support.worlds.router_rig import RouterRig


def test_a_handed_over_request_has_a_ticket_for_its_two_nodes() -> None:
    rig = RouterRig()
    p, d = rig.join("prefill", "p"), rig.join("decode", "d")
    rig.now = 7.0
    (generate,) = rig.open(prompt=(1, 2, 3), n=2, max_tokens=5)
    tickets, ticket, key = rig.dispatcher.tickets, generate.ticket, key_of(generate.key)
    assert ticket is not None and is_genuine(tickets.key_of(d.peer), key, p.peer, ticket)
    assert is_genuine(tickets.key_of(d.peer), key.sibling(1), p.peer, ticket)
    assert not is_genuine(tickets.key_of(d.peer), key.sibling(2), p.peer, ticket)
    assert not is_genuine(tickets.key_of(p.peer), key, p.peer, ticket), "a prefill node's own key makes none"
    assert (ticket.num_sequences, ticket.most_tokens, ticket.deadline_ms) == (2, 8, 67_000)


def test_each_router_s_life_has_keys_of_its_own() -> None:
    one, other = Tickets(), Tickets()
    assert one.key_of("d@1") == one.key_of("d@1") != other.key_of("d@1")
    assert one.key_of("d@1") != one.key_of("d@2")


def test_a_request_that_stays_on_one_node_has_none() -> None:
    rig = RouterRig()
    rig.join("decode", "d")
    (generate,) = rig.open()
    assert generate.decode_node == "" and generate.ticket is None


def test_each_attempt_has_a_ticket_of_its_own() -> None:
    rig = RouterRig(max_attempts=3)
    rig.join("prefill", "p")
    nodes = {node.node_id: node for node in (rig.join("decode", "d0"), rig.join("decode", "d1"))}
    (first,) = rig.open()
    effects = rig.dispatcher.node_lost(nodes[first.decode_node], "test", rig.now)
    rig.registry.remove(nodes[first.decode_node])
    effects.sends += rig.dispatcher.tick(rig.now).sends
    again = [message for _, message in effects.sends if hasattr(message, "ticket")]
    assert again and again[-1].ticket != first.ticket and again[-1].key.attempt == 1


def test_a_deadline_of_no_end_fits_the_wire() -> None:
    assert deadline_ms(float("inf")) == MAX_MS and deadline_ms(-1.0) == 0 and deadline_ms(1.5) == 1500
