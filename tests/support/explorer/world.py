"""A simulated world whose schedule is a value: drawn by seed, recorded, replayed, and shrunk.

    runs      at which of the host's points the world moves, and how far; elsewhere it stands still until the host waits
    changes   after which steps the stream that ran loses its rank (PCT: random priorities, rare changes)
    bound     how often a closure may be left between two of its yields while it could go on (bounded preemption)

A schedule with fewer entries is a simpler one: the empty one runs everything as late as possible, in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.device.events import Event
from tests.support.cores.simulated_streams import RUN_LENGTHS, SimulatedStream, World

BOUNDS = (0, 1, 3, 10, None, None)
PATIENCE = (8, 30, 100)  # fruitless questions of a polling host before the world must move
FORCED_STEPS = 12
LAZY = (0.8, 0.95, 1.0)


@dataclass(frozen=True)
class Schedule:
    """What one world decided. `preemptions` are the steps at which a closure was left half-way."""

    runs: dict[int, int] = field(default_factory=dict)
    changes: frozenset[int] = frozenset()
    preemptions: frozenset[int] = frozenset()

    @property
    def size(self) -> int:
        return len(self.runs) + len(self.changes) + len(self.preemptions)


class ExplorerWorld(World):
    """Draws its schedule, or follows a given one. The ranks that streams begin with are the seed's in both cases."""

    def __init__(self, seed: int, schedule: Schedule | None = None, *, eager: bool = False, lazy: bool = False) -> None:
        super().__init__(seed)
        self.bound = self._random.choice(BOUNDS)
        self._patience = PATIENCE[0] if eager else self._random.choice(PATIENCE[1:] if lazy else PATIENCE)
        if lazy:
            self.laziness = self._random.choice(LAZY)
        self._given = schedule
        self._points = 0
        self._last: SimulatedStream | None = None
        self._runs: dict[int, int] = {}
        self._changes: set[int] = set()
        self._preemptions: set[int] = set()

    @property
    def schedule(self) -> Schedule:
        return Schedule(dict(self._runs), frozenset(self._changes), frozenset(self._preemptions))

    def host_point(self) -> None:
        if self._in_world:
            return
        index, taken = self._points, 0
        self._points += 1
        wanted = self._draw_run() if self._given is None else self._given.runs.get(index, 0)
        while taken < wanted and self._run_one():
            taken += 1
        if taken:
            self._runs[index] = taken

    def poll(self, event: Event) -> None:
        if self._in_world:
            return
        self.host_point()
        self._polls += 1
        if not event.peek() and self._polls >= self._patience:
            self._polls = 0
            for _ in range(FORCED_STEPS):
                self._run_one()

    def _draw_run(self) -> int:
        return 0 if self._random.random() < self.laziness else self._random.choice(RUN_LENGTHS)

    def _run_one(self) -> bool:
        runnable = [stream for stream in self._streams.values() if stream.head() is not None]
        if not runnable:
            return False
        stream = self._choose(runnable)
        self._step(stream)
        self._last = stream
        if self._changes_rank():
            self._changes.add(self.num_steps)
            stream.priority = min(other.priority for other in self._streams.values()) - 1.0
            self.note(stream.name, "rank", "last from here on")
        return True

    def _choose(self, runnable: list[SimulatedStream]) -> SimulatedStream:
        best = max(runnable, key=lambda candidate: candidate.priority)
        last = self._last
        if last is None or last is best or last._running is None or last not in runnable:
            return best
        index = self.num_steps + 1
        if not self._may_preempt(index):
            return last
        self._preemptions.add(index)
        self.note(last.name, "preempted", f"by {best.name}")
        return best

    def _may_preempt(self, index: int) -> bool:
        if self._given is not None:
            return index in self._given.preemptions
        return self.bound is None or len(self._preemptions) < self.bound

    def _changes_rank(self) -> bool:
        if self._given is not None:
            return self.num_steps in self._given.changes
        return self._random.random() < self.change_rate
