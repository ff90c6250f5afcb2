"""Count a node's events between heartbeats, without registry or sockets."""

from __future__ import annotations

from shared.core.states import QueueStage
from shared.observe.metric_names import FAMILIES, NODE_COUNTERS, NODE_HISTOGRAMS, QUEUE_PREFIX, QUEUE_STAGES

MAX_SAMPLES = 512  # limit on samples per name and heartbeat; further samples are lost, but counters count all events


class NodeMetrics:
    """Counts events since the epoch began, and keeps samples for the next heartbeat. Loop thread only."""

    def __init__(self) -> None:
        known = (*NODE_COUNTERS, *(family.prefix + value for family in FAMILIES for value in family.values))
        self._counters: dict[str, float] = dict.fromkeys(known, 0.0)
        self._samples: dict[str, list[float]] = {}

    def count(self, name: str, amount: float = 1.0) -> None:
        if name not in self._counters:
            raise KeyError(f"no counter {name!r}; add it to metric_names")
        self._counters[name] += amount

    def observe(self, name: str, value: float) -> None:
        if name not in NODE_HISTOGRAMS and name.removeprefix(QUEUE_PREFIX) not in QUEUE_STAGES:
            raise KeyError(f"no histogram {name!r}; add it to metric_names")
        samples = self._samples.setdefault(name, [])
        if len(samples) < MAX_SAMPLES:
            samples.append(value)

    def observe_queue(self, stage: QueueStage, seconds: float) -> None:
        self.observe(QUEUE_PREFIX + stage, seconds)

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def take_observations(self) -> dict[str, list[float]]:
        taken, self._samples = self._samples, {}
        return taken
