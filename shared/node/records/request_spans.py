"""The spans of a node's traced requests, below the span of the attempt that its router sent.

    alone      wait, prompt chunk, ..., decode
    prefill    wait, offer, prompt chunk, ..., hand-off
    decode     memory, transfer, install, decode

Waits for the other node (offer, memory, transfer) run beside its chunks; the others follow one another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from shared.core.keys import RequestKey
from shared.core.trace_context import is_sampled
from shared.engine.plan import RowId
from shared.observe.step_records import StepRecords
from shared.observe.tracer import Attributes, Tracer
from shared.sched.steps.events import Ended

MOST_TRACED = 1024  # requests; the oldest is forgotten, since some end unseen


@dataclass(slots=True)
class Traced:
    parent: str  # the traceparent that came with the request
    hands_over: bool
    decodes_since: float | None = None
    num_steps: int = 0
    slowest_s: float = 0.0


class RequestSpans:
    """Owned by the node's loop. Without a tracer nothing is traced, and a call costs a look at an empty dict.

    While `records` are asked for, they get the stages of all requests."""

    def __init__(self, tracer: Tracer | None = None, records: StepRecords | None = None) -> None:
        self._tracer = tracer
        self._records = records or StepRecords()
        self._traced: OrderedDict[RequestKey, Traced] = OrderedDict()

    @property
    def is_tracing(self) -> bool:
        return bool(self._traced)

    def follow(self, key: RequestKey, trace: str, *, hands_over: bool = False) -> None:
        """`trace`: as a peer sent it, which may be any text."""
        if self._tracer is not None and is_sampled(trace):
            self._traced[key] = Traced(trace, hands_over)
            if len(self._traced) > MOST_TRACED:
                self._traced.popitem(last=False)

    def add_span(self, key: RequestKey, name: str, since: float, until: float, facts: Attributes) -> None:
        self._records.add_row("requests", name, key, since, until)
        traced = self._traced.get(key)
        if traced is not None:
            assert self._tracer is not None
            self._tracer.add_span(name, traced.parent, since, until, {**facts, "baton.sequence": key.seq_index})

    def installed(self, key: RequestKey, since: float) -> None:
        now = self._records.clock()  # the installation itself takes time
        self.add_span(key, "install", since, now, {})
        if key in self._traced:
            self._traced[key].decodes_since = now

    def handed_over(self, key: RequestKey, since: float, until: float, transport: str) -> None:
        self.add_span(key, "hand-off", since, until, {"baton.transport": transport})
        self._traced.pop(key, None)

    def step_over(self, rows: Sequence[RowId], num_prefill: int, since: float, until: float) -> None:
        """A step has ended, whose first `num_prefill` rows were chunks of prompts."""
        for index, row in enumerate(rows):
            traced = self._traced.get(row.key)
            if traced is None:
                continue
            if index < num_prefill:
                self.add_span(row.key, "prompt chunk", since, until, {})
                traced.decodes_since = None if traced.hands_over else until
            else:
                traced.num_steps += 1
                traced.slowest_s = max(traced.slowest_s, until - since)

    def ended(self, end: Ended) -> None:
        traced = self._traced.get(end.key)
        if traced is None:
            return
        if traced.decodes_since is not None:
            assert self._tracer is not None
            facts = {
                "baton.output_tokens": end.num_output_tokens,
                "baton.steps": traced.num_steps,
                "baton.slowest_step_s": traced.slowest_s,
                "baton.finish_reason": end.reason.value,
            }
            self.add_span(end.key, "decode", traced.decodes_since, self._tracer.clock(), facts)
        del self._traced[end.key]
