"""The spans of one prompt's way through the router: queue, placement, then one attempt after another.

answer's span ── queue ── placement ── attempt 0 ── placement ── attempt 1 (linked with attempt 0, and why)
                                        '── first token; the nodes' spans
"""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.registry import RegisteredNode
from shared.core.errors import BatonError
from shared.observe.tracer import OpenSpan, Tracer


class Untraced:
    """Takes the news of a request without spans."""

    def left_queue(self) -> None: ...

    def sent(self, number: int, nodes: Sequence[RegisteredNode]) -> str:
        """Return the traceparent for the nodes; "" for the client's."""
        return ""

    def first_token(self) -> None: ...

    def attempt_over(self, reason: str) -> None: ...

    def over(self, error: BatonError | None) -> None: ...


UNTRACED = Untraced()


class Journey(Untraced):
    """Owned by the router's loop. Its own clock shows what work between two calls took.

    `root`: the traceparent of the answer's span."""

    def __init__(self, tracer: Tracer, root: str) -> None:
        self._tracer = tracer
        self._root = root
        self._stage = "queue"  # "" while an attempt is open
        self._since = tracer.clock()
        self._attempt: OpenSpan | None = None
        self._last: OpenSpan | None = None
        self._reason = ""  # why the last attempt ended

    def left_queue(self) -> None:
        self._next("placement")

    def sent(self, number: int, nodes: Sequence[RegisteredNode]) -> str:
        self._next("")
        facts: dict[str, str | int] = {f"baton.{node.role}_node": node.node_id for node in nodes}
        facts["baton.attempt"] = number
        if self._reason:
            facts["baton.resume.reason"] = self._reason
        self._attempt = self._tracer.begin_span("attempt", self._root, self._since, facts, after=self._last)
        return "" if self._attempt is None else self._attempt.traceparent

    def first_token(self) -> None:
        if self._attempt is not None:
            self._tracer.add_span("first token", self._attempt.traceparent, self._since, self._tracer.clock(), {})

    def attempt_over(self, reason: str) -> None:
        self._close_attempt(reason)
        self._reason = reason
        self._stage, self._since = "placement", self._tracer.clock()

    def over(self, error: BatonError | None) -> None:
        self._next("", "" if error is None else error.code)
        self._close_attempt("" if error is None else error.code)

    def _next(self, stage: str, error: str = "") -> None:
        now = self._tracer.clock()
        if self._stage:
            self._tracer.add_span(self._stage, self._root, self._since, now, {}, error)
            self._since = now
        self._stage = stage

    def _close_attempt(self, error: str) -> None:
        if self._attempt is not None:
            self._attempt.end_span(self._tracer.clock(), error)
            self._last, self._attempt = self._attempt, None
