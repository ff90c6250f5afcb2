"""Launch a step's later pipeline stages, and its sampling. Pipelines get no new features
(shared/config/settings/frozen.py).

With one stage, sampling is launched with its forward:

    forward   | forward(N) sample(N) | forward(N+1) sample(N+1) |

With two stages, the first stage's stream has the relay, so that stream also samples. Sampling is launched a step late,
so this stream never waits:

    forward   | forward(N) | forward(N+1) sample(N) | forward(N+2) sample(N+1) |
    stage1                 | stage(N)               | stage(N+1)               |
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from shared.core.errors import ConfigError
from shared.device.events import Ticket
from shared.device.streams import StreamSet
from shared.engine.lease import StepLease
from shared.engine.plan import Int64s
from shared.kv.pool import KVPool
from shared.model.math.interface import Carried, Model, ModelInputs, ModelOutput, Stage

Sample = Callable[[StepLease], None]


class Stages(Protocol):
    """The engine and the loop call these methods on the host."""

    def follow(self, lease: StepLease) -> None:
        """Launch the step's later stages, and then sampling that is due."""
        ...

    def flush(self) -> bool:
        """Launch all late sampling, before other code writes the relay or waits for these steps.

        Return whether any sampling was late.
        """
        ...

    def settle(self, num_left: int) -> None:
        """Launch late sampling if a request has left its row since the last call.

        The next step may reuse the row and pages to which late sampling still writes. `num_left`: number of departures
        so far.
        """
        ...

    def choose(self, rows: Int64s, expect_step: Int64s) -> Int64s:
        """From the batch indices `rows`, return the rows of the next step, in order.

        `expect_step`: the step that wrote each batch row's relay.
        """
        ...


def every_row(rows: Int64s, expect_step: Int64s) -> Int64s:
    return rows


class OneStage:
    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def follow(self, lease: StepLease) -> None:
        self._sample(lease)

    def flush(self) -> bool:
        return False

    def settle(self, num_left: int) -> None:
        """Do nothing: no sampling is late."""

    def choose(self, rows: Int64s, expect_step: Int64s) -> Int64s:
        return every_row(rows, expect_step)


class Pipeline:
    """Owns the steps whose sampling is not launched yet."""

    def __init__(self, later: Sequence[Stage], streams: StreamSet, kv: KVPool, sample: Sample) -> None:
        self.later = tuple(later)
        self.unsampled: deque[StepLease] = deque()
        self._streams = streams
        self._kv = kv
        self._sample = sample
        self._num_left = 0

    def follow(self, lease: StepLease) -> None:
        for index, stream in enumerate(self._streams.stages):
            before = lease.computed
            assert before is not None
            stream.wait(before.done)
            run = functools.partial(self._run, index, lease, before)
            lease.computed = stream.launch(run, label=f"stage{index + 1}({lease.step})")
        self.unsampled.append(lease)
        if len(self.unsampled) > len(self.later):
            self._sample_oldest()

    def _run(self, index: int, lease: StepLease, before: Ticket[None]) -> Generator[None, None, None]:
        """Run a stage on its stream. Raises the earlier stage's error."""
        if before.error is not None:
            raise before.error
        carry = lease.carry
        assert carry is not None and isinstance(carry.output, Carried), "a stage runs behind another"
        yield
        output = self.later[index](carry.fb.inputs, carry.output, self._kv)
        lease.carry = replace(carry, output=output)
        yield

    def flush(self) -> bool:
        waited = bool(self.unsampled)
        while self.unsampled:
            self._sample_oldest()
        return waited

    def _sample_oldest(self) -> None:
        lease = self.unsampled.popleft()
        assert lease.computed is not None
        self._streams.forward.wait(lease.computed.done)
        self._sample(lease)

    def settle(self, num_left: int) -> None:
        if num_left != self._num_left:
            self._num_left = num_left
            self.flush()

    def choose(self, rows: Int64s, expect_step: Int64s) -> Int64s:
        """Return the longest-waiting rows: at most 1 / n of all rows, rounded up, because n stages hold n batches.

        A row can't run again until its token is sampled.
        """
        unsampled = {lease.step for lease in self.unsampled}
        free = [row for row in rows.tolist() if int(expect_step[row]) not in unsampled]
        most = -(-len(rows) // (1 + len(self.later)))
        return np.asarray(sorted(sorted(free, key=lambda row: int(expect_step[row]))[:most]), dtype=np.int64)


class FirstStage:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def forward(self, model: Model, inputs: ModelInputs, kv: KVPool) -> Carried | ModelOutput:
        return self._stage(inputs, None, kv)


def make_stages(parts: Sequence[Stage], streams: StreamSet, kv: KVPool, sample: Sample) -> Stages:
    """`parts`: all stages of a pipeline, or none. Raises ConfigError unless each stage has a stream."""
    if max(1, len(parts)) != 1 + len(streams.stages):
        raise ConfigError(f"{len(parts)} stages on {1 + len(streams.stages)} streams")
    return Pipeline(parts[1:], streams, kv, sample) if parts else OneStage(sample)
