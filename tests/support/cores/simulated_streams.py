"""Simulate streams on one thread, in an order that the events allow. A seed chooses the order.

A closure may be a generator: at each `yield` another stream may run. The world picks streams by random priorities that
rarely change (PCT, which finds orders that a uniform choice misses). The seed also draws the laziness: the share of the
host's calls (launch, wait, query) that do not run the world.

    host   launch A   launch B   synchronize(B)
    world      . A1       .       B1  A2  B2            (scripted: world.run("a", 1), world.run("b", 2))
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from shared.device.events import Event, Ticket
from shared.device.stream import Closure, StreamEpochs, Work, make_work
from shared.device.streams import NAMES, StreamSet

R = TypeVar("R")
CHANGE_RATES = (0.0, 0.01, 0.05, 0.2)
LAZINESS = (0.0, 0.5, 0.8, 0.95, 1.0)
RUN_LENGTHS = (1, 2, 5, 20, 1000)
FRUITLESS_POLLS = 8  # after this many failed polls a step runs, because some hosts only poll


class DeadlockError(RuntimeError):
    """Raised if the host waits and no stream can run."""


class SimulatedStream:
    """`items`: closures and waits, in launch order."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self.priority = 0.0
        self.items: deque[Work[Any] | Event] = deque()
        self._epochs = StreamEpochs()
        # the generator of the first item's closure, once its first step has run
        self._running: Generator[None, None, Any] | None = None

    @property
    def epoch(self) -> int:
        return self._epochs.current

    def launch(self, fn: Closure[R], fires: Sequence[Event] = (), label: str = "") -> Ticket[R]:
        work = make_work(fn, fires, label, self.name, self.epoch)
        for event in (*work.fires, work.ticket.done):
            event.bind(self.world)
        self.items.append(work)
        self.world.note(self.name, "launch", work.label)
        self.world.host_point()
        return work.ticket

    def wait(self, event: Event) -> None:
        event.bind(self.world)
        self.items.append(event)
        self.world.note(self.name, "wait", event.name)
        self.world.host_point()

    def reset(self) -> None:
        self._epochs.open_next()
        self.world.note(self.name, "reset", f"epoch {self.epoch}")

    def stop(self) -> None:
        """Skip all items, and close a closure that is between two steps."""
        while self.items:
            item = self.items.popleft()
            if isinstance(item, Work):
                if self._running is not None:
                    self._running.close()
                    self._running = None
                item.skip("the stream was stopped")

    def head(self) -> Work[Any] | None:
        while self.items and isinstance(self.items[0], Event) and self.items[0].peek():
            self.items.popleft()
        head = self.items[0] if self.items else None
        return head if isinstance(head, Work) else None

    def stuck_on(self) -> str:
        head = self.items[0] if self.items else None
        return "idle" if head is None else f"waits for {head!r}" if isinstance(head, Event) else f"can run {head.label}"

    def step(self) -> None:
        work = self.head()
        if work is None:
            raise RuntimeError(f"stream {self.name} has nothing to run: {self.stuck_on()}")
        if self._running is None and self._epochs.has_failed(work.epoch):
            self._finish("skip", work, lambda: work.skip("its stream epoch failed"))
            return
        try:
            done, result = self._advance(work)
        except Exception as error:
            self._epochs.fail(work.epoch)
            failure = error
            self._finish(f"fail {failure!r}", work, lambda: work.settle(None, failure))
        else:
            if done:
                self._finish("end", work, lambda: work.settle(result, None))

    def _advance(self, work: Work[Any]) -> tuple[bool, Any]:
        with torch.inference_mode():
            if self._running is None:
                self.world.note(self.name, "start", work.label)
                out = work.fn()
                if not isinstance(out, Generator):
                    return True, out
                self._running = out
            try:
                next(self._running)
            except StopIteration as end:
                return True, end.value
        self.world.note(self.name, "yield", work.label)
        return False, None

    def _finish(self, what: str, work: Work[Any], settle: Callable[[], None]) -> None:
        self._running = None
        self.items.popleft()
        self.world.note(self.name, what, work.label)
        settle()


class World:
    """Owns simulated streams, and drives their events (EventDriver).

    `laziness` in [0, 1]; None: the seed draws it.
    """

    def __init__(self, seed: int, *, laziness: float | None = None, change_rate: float | None = None) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self.laziness = self._random.choice(LAZINESS) if laziness is None else laziness
        self.change_rate = self._random.choice(CHANGE_RATES) if change_rate is None else change_rate
        self.scripted = False
        self.num_steps = 0
        self._streams: dict[str, SimulatedStream] = {}
        self._log: list[tuple[int, str, str, str]] = []
        self._in_world = False
        self._polls = 0

    @classmethod
    def script(cls) -> World:
        """Return a world that runs only in run(), run_until_idle() and synchronize()."""
        world = cls(0, laziness=1.0, change_rate=0.0)
        world.scripted = True
        return world

    def stream(self, name: str) -> SimulatedStream:
        if name not in self._streams:
            stream = SimulatedStream(name, self)
            stream.priority = self._random.random()
            self._streams[name] = stream
        return self._streams[name]

    def run(self, name: str, steps: int = 1) -> None:
        """Advance a scripted stream. A closure with k yields has k + 1 steps. Raise RuntimeError if it can't run."""
        for _ in range(steps):
            self._step(self.stream(name))

    def run_stream(self, name: str) -> int:
        steps = 0
        while self.stream(name).head() is not None:
            self.run(name)
            steps += 1
        return steps

    def run_until_idle(self) -> None:
        while self._run_one():
            pass

    def host_point(self) -> None:
        if self.scripted or self._in_world or self._random.random() < self.laziness:
            return
        for _ in range(self._random.choice(RUN_LENGTHS)):
            if not self._run_one():
                return

    def poll(self, event: Event) -> None:
        if self.scripted or self._in_world:
            return
        self.host_point()
        self._polls += 1
        if not event.peek() and self._polls >= FRUITLESS_POLLS:
            self._polls = 0
            self._run_one()

    def block(self, event: Event, timeout_s: float | None) -> None:
        """Run the world until the event completes, without a timeout. Raise DeadlockError."""
        if self._in_world:
            raise DeadlockError(f"a closure blocks on {event!r}; use stream.wait() before launching it")
        self.note("host", "sync", event.name)
        while not event.peek():
            if not self._run_one():
                raise DeadlockError(f"the host waits for {event!r} and nothing can run\n{self.describe()}")

    def defer(self, event: Event) -> bool:
        error = f" error={event.error!r}" if event.error else ""
        self.note("", "fire", event.name + error)
        return False

    def note(self, stream: str, what: str, label: str) -> None:
        self._log.append((self.num_steps, stream, what, label))

    def timeline(self, last: int | None = None) -> str:
        lines = self._log if last is None else self._log[-last:]
        return "\n".join(f"{step:6d} {stream:10s} {what:8s} {label}" for step, stream, what, label in lines)

    def describe(self) -> str:
        head = f"world seed {self.seed}, laziness {self.laziness}, change rate {self.change_rate}"
        return "\n".join([head, *(f"  {name}: {stream.stuck_on()}" for name, stream in self._streams.items())])

    def _run_one(self) -> bool:
        runnable = [stream for stream in self._streams.values() if stream.head() is not None]
        if not runnable:
            return False
        stream = max(runnable, key=lambda candidate: candidate.priority)
        self._step(stream)
        if self._random.random() < self.change_rate:
            stream.priority = min(other.priority for other in self._streams.values()) - self._random.random()
        return True

    def _step(self, stream: SimulatedStream) -> None:
        self.num_steps += 1
        self._in_world = True
        try:
            stream.step()
        finally:
            self._in_world = False


def simulated_streams(world: World, num_stages: int = 1) -> StreamSet:
    """`num_stages`: as for shared.device.streams.make_streams."""
    stages = tuple(world.stream(f"stage{index}") for index in range(1, num_stages))
    return StreamSet(*map(world.stream, NAMES), stages=stages)
