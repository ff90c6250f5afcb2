"""Two prefill nodes, of which one has computed a prompt that comes to the other next."""

from __future__ import annotations

import array
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from prefill_node.side import PrefillSide
from shared.core.page_identity import KEY_BYTES, identities, prefix_keys
from shared.core.sampling_params import SamplingParams
from shared.model.math.interface import Model
from shared.node.loop.node import Node
from shared.transfer.frames import FrameReceiver
from shared.transfer.interface import Frames, PageList
from shared.wire.codec import key_of
from shared.wire.messages import Key, Lent, Message, PrefixSource, Pull, Ready
from shared.wire.peers import Received
from shared.wire.ranges import MAX_MS
from shared.wire.tickets import make_ticket, ticket_key
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.node_pair import ROUTER_EPOCH, ROUTER_ID, SECRET, Net, expected, make_node, name_of


def job(number: int = 1, tokens: int = 100, max_tokens: int = 5, seed: int = 1, **more: Any) -> Job:
    """Jobs of one seed begin alike; they differ from token 90 on."""
    prompt = tuple((seed * 7 + i * i) % 40 for i in range(min(90, tokens)))
    prompt += tuple((number * 11 + i) % 40 for i in range(tokens - len(prompt)))
    return Job(number, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), number, **more)


Struct = TypeVar("Struct", bound=msgspec.Struct)


class PullPair:
    """`s` has pages, `p` is to have them. A decode node `d` takes hand-offs."""

    def __init__(
        self,
        knobs: CoreKnobs | None = None,
        transport: str = "zmq",
        s_knobs: CoreKnobs | None = None,
        model: Model | None = None,
    ) -> None:
        """`model`: another than the knobs describe, for all nodes."""
        knobs = knobs or CoreKnobs()
        self.s = make_node("prefill", "s", s_knobs or knobs, transport=transport, model=model)
        self.p = make_node("prefill", "p", knobs, transport=transport, model=model)
        self.d = make_node("decode", "d", knobs, transport=transport, model=model)
        self.net = Net([self.s, self.p, self.d])
        self.net.run()

    @property
    def lender(self) -> PrefillSide:
        assert isinstance(self.s.side, PrefillSide)
        return self.s.side

    @property
    def asker(self) -> PrefillSide:
        assert isinstance(self.p.side, PrefillSide)
        return self.p.side

    def warm(self, one: Job) -> None:
        """The source computes a prompt that begins alike."""
        key = self.net.generate(self.s, one)
        self.net.run_until_ended([key])
        self.net.run()

    def pull_back(self, one: Job) -> Key:
        """Send `s` a prompt and the word that `p` has its pages."""
        self.s, self.p = self.p, self.s
        key = self.ask(one)
        self.s, self.p = self.p, self.s
        return key

    def source(self, one: Job, num_pages: int = 5, within_ms: int = 1000, attempt: int = 0) -> PrefixSource:
        """The router's word that `s` has these pages and that `p` may have them."""
        settings = self.s.ctx.core.settings
        tokens = array.array("q", one.prompt).tobytes()
        keys = prefix_keys(tokens, one.adapter, settings.drafts.key_lookahead, one.cache_salt)
        *_, last = identities(keys[: num_pages * settings.page_size * KEY_BYTES], settings.page_size)
        facts = self.s.ctx.facts
        ticket = make_ticket(
            ticket_key(SECRET, name_of(self.s)),
            key_of(Key(ROUTER_ID, ROUTER_EPOCH, f"r{one.rid}", attempt, 0)),
            name_of(self.p),
            num_sequences=1,
            most_tokens=num_pages * settings.page_size + 1,
            deadline_ms=MAX_MS,
            page=last,
        )
        return PrefixSource(facts.node_id, facts.epoch, facts.endpoint, num_pages, last, within_ms, ticket)

    def ask(self, one: Job, source: PrefixSource | None = None, decode: Node | None = None, n: int = 1) -> Key:
        """Send `p` a prompt and the word of where its pages are."""
        return self.net.generate(self.p, one, decode, num_sequences=n, source=source or self.source(one))

    def finish(self, key: Key, one: Job) -> None:
        """The stream is right, and nothing is left."""
        self.net.run_until_ended([key])
        assert self.net.router.streams[key] == expected(one)
        assert self.net.router.end(key).reason != "error"
        self.rest()

    def turn_until(self, holds: Callable[[], bool]) -> None:
        """For nodes with threads."""
        deadline = time.monotonic() + HANG_GUARD_S
        while not holds():
            assert time.monotonic() < deadline, "it never came"
            self.net.turn()

    def rest(self) -> None:
        """Let all time limits pass, then look for leaks."""
        self.net.run()
        self.net.at(20.0)
        self.net.run()
        self.net.settle(*(node for node in self.net.nodes.values() if name_of(node) not in self.net.dead))

    def say(self, pull: Pull, peer: str = "") -> Lent:
        """The source's answer to a Pull of `p`, or of another peer."""
        before = len(self.net.seen)
        self.net.inboxes[name_of(self.s)].append(Received(peer or name_of(self.p), pull))
        self.net.tick(name_of(self.s))
        return next(answer for _, _, answer in self.net.seen[before:] if isinstance(answer, Lent))

    def count(self, name: str, node: Node | None = None) -> int:
        return int((node or self.p).ctx.metrics.counters()[name])

    def said(self, kind: type[Message], sender: Node) -> list[Message]:
        return [message for source, _, message in self.net.seen if source == name_of(sender) and type(message) is kind]


class Slow(FrameReceiver):
    """Copies when it is told to."""

    def __init__(self, rig: PullPair) -> None:
        super().__init__(rig.p.ctx.core.pool)
        self.may_go, self.has_begun = threading.Event(), threading.Event()

    def pull(self, ready: Ready, frames: Frames, dst_pages: PageList) -> None:
        self.has_begun.set()
        assert self.may_go.wait(HANG_GUARD_S)
        super().pull(ready, frames, dst_pages)


def changed(struct: Struct, **fields: object) -> Struct:
    return msgspec.structs.replace(struct, **fields)
