"""Nodes whose protocol does not work with ours: they get no Welcome, and so no requests; people see them. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass

from shared.wire.messages import Hello
from shared.wire.versions import PROTOCOL_VERSION, work_together

FORGET_S = 30.0  # without a Hello; an unanswered node repeats its Hello more often
MAX_STRANGERS = 64


@dataclass(frozen=True, slots=True)
class Stranger:
    node_id: str
    role: str
    protocol: int
    heard_at: float


class Strangers:
    def __init__(self) -> None:
        self._known: dict[str, Stranger] = {}  # the one heard last is the last

    def is_one(self, hello: Hello, now: float) -> bool:
        """Return whether this node's protocol does not work with ours, and note the node if so."""
        self._known.pop(hello.node_id, None)  # it may have been upgraded
        protocol = hello.fingerprint.protocol
        if work_together(protocol, PROTOCOL_VERSION):
            return False
        if len(self._known) >= MAX_STRANGERS:
            del self._known[next(iter(self._known))]
        self._known[hello.node_id] = Stranger(hello.node_id, hello.role, protocol, now)
        return True

    def shown(self, now: float) -> list[dict[str, object]]:
        return [
            {"node": one.node_id, "role": one.role, "protocol": one.protocol, "ours": PROTOCOL_VERSION}
            for one in self._known.values()
            if now - one.heard_at <= FORGET_S
        ]
