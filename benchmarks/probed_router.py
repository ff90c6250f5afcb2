"""Run `baton router` with a probe in its event loop, for measurements: `probed_router.py LAGS_FILE [flags of router]`.

Beside LAGS_FILE, the file BEATS of the same folder gets the times at which each node's heartbeats were read.

The probe is due every PERIOD_S. The time by which it is late is the delay of any other callback at this moment. A loop
that is blocked for several periods makes each of them late, so a long block counts with its length.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections import defaultdict
from pathlib import Path

from router import app
from router.dispatch.gateway import Gateway
from shared.wire.messages import Heartbeat
from shared.wire.peers import Inbound, Received

PERIOD_S = 0.005
MOST = 1 << 20  # samples that are kept
BEATS = "beats-read.json"


class Probe:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._due = array("d")
        self._late = array("d")

    async def run(self) -> None:
        """Sample until cancelled. Then write pairs of (due time, lateness), in seconds of the monotonic clock."""
        due = time.monotonic()
        try:
            while len(self._due) < MOST:
                due += PERIOD_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                now = time.monotonic()
                self._add(due, now)
                while due + PERIOD_S < now:
                    due += PERIOD_S
                    self._add(due, now)
        finally:
            pairs = array("d", [value for pair in zip(self._due, self._late, strict=True) for value in pair])
            self._path.write_bytes(pairs.tobytes())

    def _add(self, due: float, now: float) -> None:
        self._due.append(due)
        self._late.append(now - due)


def read_lags(path: Path, begin: float, end: float) -> list[float]:
    """Return the sorted lateness of the samples that were due in this time, in seconds."""
    pairs = array("d")
    pairs.frombytes(path.read_bytes())
    return sorted(late for due, late in zip(pairs[::2], pairs[1::2], strict=True) if begin <= due < end)


class TimedGateway(Gateway):
    """Notes when each heartbeat is read: on the clock, and in the loop's CPU time."""

    beats: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)  # by node

    def handle(self, inbound: Inbound) -> None:
        if isinstance(inbound, Received) and isinstance(inbound.message, Heartbeat):
            self.beats[inbound.message.node_id].append((time.monotonic(), time.thread_time()))
        super().handle(inbound)


def main() -> int:
    from deploy.cli import main as run_command

    path = Path(sys.argv[1])
    probe = Probe(path)
    start = app.start_background

    def with_probe(*parts: object) -> list[asyncio.Task[None]]:
        return [*start(*parts), asyncio.create_task(probe.run())]  # type: ignore[arg-type]  # passed on as it came

    app.start_background = with_probe  # type: ignore[assignment]
    app.Gateway = TimedGateway  # type: ignore[misc]
    try:
        return run_command(["router", *sys.argv[2:]])
    finally:
        path.with_name(BEATS).write_text(json.dumps(TimedGateway.beats))


if __name__ == "__main__":
    sys.exit(main())
