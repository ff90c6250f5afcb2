"""Make the contents of a node's heartbeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.core.request import Request, RequestState
from shared.core.states import PageState, RowState
from shared.device.events import Event
from shared.engine.plan import StepPlan
from shared.node.records.core import NodeCore
from shared.node.records.request_spans import RequestSpans
from shared.observe.node_metrics import NodeMetrics
from shared.wire.messages import NodeLoad
from shared.wire.ranges import MAX_NAMES


def node_load(
    core: NodeCore, metrics: NodeMetrics, offers: Sequence[Request], hands_over: dict[str, str], cores: str = ""
) -> NodeLoad:
    """Return the load, with the samples since the last call. `offers`: see LoadShares."""
    kv, queues = core.kv, core.queues
    waiting = [*queues.waiting, *offers]
    return NodeLoad(
        pages_total=kv.allocator.num_total,
        pages={state.value: count for state, count in kv.gauges().items()},
        rows_total=kv.rows.num_total,
        rows={state.value: count for state, count in _row_states(core).items()},
        waiting=len(waiting),
        waiting_tokens=sum(req.num_tokens for req in waiting),
        spec_width=core.scheduler.planner.widths.choose(len(queues.running)),
        counters=metrics.counters(),
        observations=metrics.take_observations(),
        hands_over=dict(list(hands_over.items())[:MAX_NAMES]),
        cores=cores,
        kept_pages=core.scheduler.capacity.keep_free(),
    )


def _row_states(core: NodeCore) -> dict[RowState, int]:
    tags = core.kv.row_gauges()
    running = sum(req.state is RequestState.RUNNING for req in core.requests.values())
    running = min(running, tags[PageState.ACTIVE])
    return {
        RowState.FREE: tags[PageState.FREE],
        RowState.RUNNING: running,
        RowState.PREFILLING: tags[PageState.ACTIVE] - running,
        RowState.GRANTED: tags[PageState.GRANTED],
        RowState.HELD: tags[PageState.HELD],
    }


@dataclass(slots=True, eq=False)
class WatchedStep:
    """The thread that completes the step sets `ended_at`. `_closed` sets `before`, the previous step, to None."""

    launched_at: float
    prompt_tokens: int
    done: Event
    before: WatchedStep | None
    ended_at: float | None = None
    traced: StepPlan | None = None  # set if a request of the step may have spans

    @property
    def began_at(self) -> float:
        """Return when the step's own time began: after its wait for the previous step."""
        if self.before is None or self.before.ended_at is None:
            return self.launched_at
        return max(self.launched_at, self.before.ended_at)

    @property
    def seconds(self) -> float:
        assert self.ended_at is not None
        return max(0.0, self.ended_at - self.began_at)


class StepWatch:
    """Measures steps from outside: the node calls `look` after each call of `core.step`.

    The time from a step's end to the next launch is idle if requests were running. The worker's thread also calls
    `clock`.
    """

    def __init__(self, core: NodeCore, metrics: NodeMetrics, clock: Callable[[], float], spans: RequestSpans) -> None:
        self._core = core
        self._spans = spans
        self._metrics = metrics
        self._clock = clock
        self._open: dict[int, WatchedStep] = {}
        self._newest: WatchedStep | None = None
        self._busy_before = False
        self._counted: dict[str, float] = {}
        self._steps = (0, 0)

    def look(self, now: float) -> None:
        open_steps = set()
        for lease in self._core.engine.leases:
            open_steps.add(lease.step)
            if lease.step not in self._open and isinstance(lease.work, StepPlan) and lease.result is not None:
                self._began(lease.step, lease.work, lease.done, now)
        for step in [step for step in self._open if step not in open_steps]:
            self._closed(self._open.pop(step), now)
        self._busy_before = len(self._core.queues.running) > 0

    def _began(self, step: int, plan: StepPlan, done: Event, now: float) -> None:
        before = self._newest
        if before is not None and before.ended_at is not None and self._busy_before:
            self._metrics.count("device_idle_seconds", max(0.0, now - before.ended_at))
        began = WatchedStep(now, plan.prompt_tokens, done, before)
        began.traced = plan if self._spans.is_tracing else None
        self._open[step] = self._newest = began
        done.add_callback(lambda _: self._ended(began))

    def _ended(self, step: WatchedStep) -> None:
        step.ended_at = self._clock()

    def _closed(self, step: WatchedStep, now: float) -> None:
        """A failed step computed no prompt tokens."""
        self._metrics.observe("step_seconds", max(0.0, now - step.launched_at))
        if step.prompt_tokens and step.ended_at is not None and step.done.error is None:
            self._metrics.count("prompt_steps")
            self._metrics.count("prompt_step_tokens", step.prompt_tokens)
            self._metrics.count("prompt_step_seconds", step.seconds)
        if step.traced is not None and step.ended_at is not None:
            self._spans.step_over(step.traced.row_ids, step.traced.num_prefill, step.began_at, step.ended_at)
        step.before = None

    def count(self) -> None:
        graphs = self._core.graphs
        now = self._core.queues.counters.totals() | ({} if graphs is None else graphs.totals())
        for name, total in now.items():
            self._metrics.count(name, total - self._counted.get(name, 0.0))
        self._counted = now
        steps = self._core.loop.num_steps, self._core.loop.num_failed_steps
        self._metrics.count("steps", steps[0] - self._steps[0])
        self._metrics.count("failed_steps", steps[1] - self._steps[1])
        self._steps = steps
