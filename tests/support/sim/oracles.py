"""What must hold at every moment, not only at the end: rules that another mechanism would make up for in time, so that
no stream would ever show that they are broken.

    a node works for routers that it is in touch with, and for peers that it has not been told are gone
    a router waits for no node that has been mute for long, and for no node that never took the request
    an attempt does not begin before what was emitted when it was sent
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from decode_node.side import DecodeSide
from prefill_node.side import PrefillSide
from router.fleet.registry import RegisteredNode
from router.requests.journal import OpenRequest
from shared.core.keys import RequestKey
from shared.wire.messages import Key, Tokens
from shared.wire.peers import Inbound, Received
from tests.support.sim.hosts import NodeHost, RouterHost

TOLERANCE_S = 0.6  # two ticks of a router, and a little


class Violation(AssertionError):
    """An oracle said no. `word` finds the culprit in the trace."""

    def __init__(self, what: str, word: str = "") -> None:
        super().__init__(what)
        self.word = word


# ---- nodes


def check_node_s_friends(host: NodeHost) -> None:
    """After a round. A peer that a node was told is gone is of no use to any request there.

    A pull uses the connection that its node dialled. The connection that its source dialled may end alone."""
    assert host.node is not None and host.port is not None
    routers, gone, lost = host.node.ctx.routers, host.port.told_gone, host.port.lost_dials
    if not gone and not lost:
        return
    for key in host.node.ctx.core.queues.requests:
        if routers.peer_of(key) is None:
            raise Violation(f"{host.name} works on {key}, whose router is gone", host.name)
    waits = [(key, peer) for key, peer in waited_for(host) if peer in gone]
    for key, peer in waits + [(key, peer) for key, peer in pulled_from(host) if peer in lost]:
        raise Violation(f"{host.name} waits for {peer} with {key}, and was told that it is gone", host.name)


def waited_for(host: NodeHost) -> Iterator[tuple[RequestKey, str]]:
    """Hand-offs that need something of a peer."""
    assert host.node is not None
    side = host.node.side
    if isinstance(side, PrefillSide):
        for handoff in [*side.bootstrap.offered.values(), *side.inflight.granted.values()]:
            yield handoff.key, handoff.peer
    elif isinstance(side, DecodeSide):
        for waiting in side.prealloc._offers.values():
            yield waiting.request.key, waiting.source
        for arriving in side.transfers.open.values():
            if arriving.needs_source:
                yield arriving.key, arriving.source


def pulled_from(host: NodeHost) -> Iterator[tuple[RequestKey, str]]:
    side = host.node.side if host.node is not None else None
    if isinstance(side, PrefillSide):
        for pull in side.pulls.open.values():
            yield pull.request.key, pull.source


DRAIN_SLACK_S = 3.0  # word of it, a heartbeat, two ticks, and the steps that are under way


@dataclass
class DrainWatch:
    """A node that was told to leave is gone when its requests' time is over."""

    _due: dict[tuple[str, int], float] = field(default_factory=dict)  # host and its life

    def told(self, host: NodeHost, within_s: float, now: float) -> None:
        self._due.setdefault((host.name, host.lives), now + within_s + DRAIN_SLACK_S)

    def look(self, host: NodeHost, now: float) -> None:
        """After each of its rounds; a node has some in every second."""
        if host.node is not None and now > self._due.get((host.name, host.lives), now):
            raise Violation(f"{host.name} was told to leave, and is there still", host.name)


# ---- routers

TWO_BEATS_S = 1.0 + 0.25  # and a tick, a round trip and clocks that differ


@dataclass
class AnswerWatch:
    """A Generate that came to nothing is not waited for longer than two heartbeats."""

    _due: dict[tuple[str, int, str, int], float] = field(default_factory=dict)  # router, its epoch, rid, attempt

    def came_to_nothing(self, key: Key, now: float) -> None:
        self._due[key.router_id, key.router_epoch, key.rid, key.attempt] = now + TWO_BEATS_S

    def look(self, host: RouterHost, now: float) -> None:
        """After a tick."""
        for name, due in list(self._due.items()):
            if name[:2] != host.identity:
                continue
            request = host.journal.find(name[2])
            if request is None or request.attempt.number != name[3]:
                del self._due[name]
            elif now > due:
                word = f"{host.name}/{name[2]}#"
                raise Violation(f"{host.name} still waits for an answer to attempt {name[3]} of {word}", word)


@dataclass
class RouterOracle:
    """Of one life of one router."""

    silence_s: float
    _heard: dict[str, float] = field(default_factory=dict)  # peer -> when a message of it was handled last
    _began_at: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # (rid, attempt) -> tokens of each

    def before(self, inbound: Inbound, host: RouterHost, now: float) -> None:
        """A message that will be handled next."""
        self._note_attempts(host)  # one that began as its client opened it, and tells of its first token now
        if isinstance(inbound, Received):
            self._heard[inbound.peer] = now
            if isinstance(inbound.message, Tokens):
                self._check_tokens(inbound.message, host)

    def _check_tokens(self, message: Tokens, host: RouterHost) -> None:
        for run in message.runs:
            began_at = self._began_at.get((run.key.rid, run.key.attempt))
            is_ours = (run.key.router_id, run.key.router_epoch) == host.identity
            if is_ours and began_at is not None and run.first_pos < began_at[run.key.seq_index]:
                word = f"{host.name}/{run.key.rid}#"
                at = f"token {run.first_pos} of {word}{run.key.attempt}.{run.key.seq_index}"
                raise Violation(
                    f"{message.node_id} computed {at}, which was out before that attempt: "
                    f"{began_at[run.key.seq_index]} were",
                    word,
                )

    def after(self, host: RouterHost, now: float) -> None:
        """A message or a tick was handled."""
        self._note_attempts(host)

    def _note_attempts(self, host: RouterHost) -> None:
        """How many tokens were out when each began."""
        for request in host.journal.all():
            key = (request.rid, request.attempt.number)
            if request.attempt.number and request.attempt.nodes and key not in self._began_at:
                self._began_at[key] = [len(sequence.ids) for sequence in request.sequences]

    def check_mute(self, host: RouterHost, now: float) -> None:
        """After a tick."""
        limit = self.silence_s + TOLERANCE_S
        for request in host.journal.all():
            for node in needed(request):
                mute_s = now - self._heard.get(node.peer, now)
                if mute_s > limit:
                    word = f"{host.name}/{request.rid}#"
                    raise Violation(f"{host.name} waits for {node.node_id} with {word}, mute for {mute_s:.1f} s", word)


def needed(request: OpenRequest) -> tuple[RegisteredNode, ...]:
    """Nodes without which it does not go on."""
    attempt = request.attempt
    begun = all(s.is_closed or i in attempt.begun_by_decode for i, s in enumerate(request.sequences))
    if attempt.decode is not None and begun:
        return (attempt.decode,)
    return attempt.nodes
