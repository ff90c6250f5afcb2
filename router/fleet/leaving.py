"""How a node leaves: who wants it, when its requests move, what it does then. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Flag, auto
from typing import Literal

from shared.wire.messages import Drain, Heartbeat

Then = Literal["", "stop", "restart", "prefill", "decode"]  # as in Drain


class By(Flag):
    """Who makes a node leave. Several may at once."""

    US = auto()  # by a Drain, which is sent again until the node's heartbeats report draining
    NODE = auto()  # by another router's Drain, or a signal
    NAMESAKE = auto()  # another router of our name, which the node serves
    LIST = auto()  # the node's list of routers, for as long as it lacks us: see Heartbeat.leaves


@dataclass(frozen=True, slots=True)
class Leaving:
    by: By
    then: Then = ""  # by our Drain
    until: float = float("inf")  # when the node's requests move

    @property
    def is_draining(self) -> bool:
        return self.by != By.LIST

    def drain(self, node_id: str, now: float) -> Drain:
        return Drain(node_id, self.then, max(0, round(1000 * (self.until - now))))


def leaving_also(before: Leaving | None, by: By) -> Leaving:
    return Leaving(by) if before is None else replace(before, by=before.by | by)


def leaving_after(before: Leaving | None, beat: Heartbeat, now: float) -> Leaving | None:
    """A node drains to its end, but its list may have us again."""
    if before is None and not beat.draining and not beat.leaves:  # the common case
        return None
    before = before or Leaving(By(0))
    by, until = before.by & ~By.LIST, before.until
    if beat.leaves:
        by |= By.LIST
    if beat.draining:
        by |= By.NODE
        if beat.move_after_ms is not None:  # another router may have set the limit
            until = now + beat.move_after_ms / 1000
    return replace(before, by=by, until=until) if by else None
