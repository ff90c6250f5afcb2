"""A prefill node that offers what it was given no ticket for: forged tickets, others', changed and used ones, among
genuine ones. A grant for anything but the first use of a genuine ticket is an error."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from shared.wire.codec import encode
from shared.wire.messages import Generate, Grant, Heartbeat, Hello, Key, Offer
from shared.wire.peers import Received
from shared.wire.tickets import NodeTicket
from tests.support.fuzz.fuzz_node import LOAD, FuzzNode

MOST_KEPT = 64  # requests that it was given
HELLO_EVERY = 400  # rounds: it says no heartbeats, so routers lose it and give its requests to others
GENUINE_SHARE = 0.2
replace = msgspec.structs.replace


class TicketForger(FuzzNode):
    """`granted`: how often, by key."""

    def __init__(self, *args: Any) -> None:
        self.granted: Counter[Key] = Counter()
        self._genuine: set[Key] = set()  # keys that an Offer with a genuine ticket was sent for
        self._given: list[Generate] = []
        self._round_number = 0
        super().__init__(*args)

    def _round(self) -> None:
        self._round_number += 1
        if self._round_number % HELLO_EVERY == 0:
            for router in self._aim.routers:
                self._say_hello(router)
        super()._round()

    def _say_hello(self, router: str) -> None:
        self._connection += 1
        hello = Hello("prefill", self._name, self._epoch, self._links.endpoint, self._fingerprint, 4096, 8, "h",
                      ["zmq"], self._connection, [])  # fmt: skip
        self._links.send(router, hello)
        self._links.send(router, Heartbeat(self._name, self._epoch, LOAD, self._is_draining))

    def _heard(self, received: Received) -> None:
        message = received.message
        self.counts[f"heard {type(message).__name__}"] += 1
        if isinstance(message, Generate):
            self.prompts.add(tuple(message.prompt_ids))
            if message.ticket is not None:
                self._given = [*self._given[1 - MOST_KEPT :], message]
        elif isinstance(message, Grant):
            self.granted[message.key] += 1
            assert message.key in self._genuine, f"a grant without a ticket: {message}"
            assert self.granted[message.key] == 1, f"a second grant by one ticket: {message}"

    def _say_anything(self, peer: str) -> None:
        """Offers to nodes; to routers nothing."""
        if peer in self._aim.nodes and self._given:
            self._say(peer, [encode(self._offer())])

    def _offer(self) -> Offer:
        given = self._rng.choice(self._given)
        assert given.ticket is not None
        offer = Offer(given.key, self._name, self._epoch, given.prompt_ids, [], given.sampling, given.seed,
                      given.remaining_ms, self._fingerprint, "h", ["zmq"], given.adapter, given.cache_salt,
                      given.ticket)  # fmt: skip
        if self._rng.random() < GENUINE_SHARE:
            index = self._rng.randrange(given.ticket.num_sequences)
            offer = replace(offer, key=replace(given.key, seq_index=index))
            self._genuine.add(offer.key)
            self.counts["genuine"] += 1
            return offer
        self.counts["forged"] += 1
        return self._forged(offer, given.ticket)

    def _forged(self, offer: Offer, ticket: NodeTicket) -> Offer:
        """Never one that a router has made, for keys that no genuine Offer is sent for."""
        rng, other = self._rng, self._rng.choice(self._given)
        key = replace(offer.key, attempt=offer.key.attempt + rng.randrange(1, 1000), seq_index=rng.randrange(3))
        beyond = replace(offer.key, seq_index=ticket.num_sequences + rng.randrange(100))
        own_key = {"key": rng.choice([key, beyond, replace(key, rid=other.key.rid), replace(key, rid="x")])}
        changed: list[dict[str, Any]] = [
            {},
            {"ticket": None},
            {"ticket": replace(ticket, code=rng.randbytes(32))},
            {"ticket": replace(ticket, code=b"")},
            {"ticket": replace(ticket, num_sequences=128)},
            {"ticket": replace(ticket, most_tokens=ticket.most_tokens + 1)},
            {"ticket": replace(ticket, deadline_ms=ticket.deadline_ms + rng.choice([1, 10**6]))},
            {"ticket": other.ticket, "prompt_ids": other.prompt_ids},
            {"remaining_ms": 10**12},
        ]
        return replace(offer, **own_key, **rng.choice(changed))
