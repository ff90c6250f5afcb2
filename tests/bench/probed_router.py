"""Run `baton router` with a probe in its event loop, for measurements: `probed_router.py LAGS_FILE [flags of router]`.

The probe is due every PERIOD_S. The time by which it is late is the delay of any other callback at this moment. A loop
that is blocked for several periods makes each of them late, so a long block counts with its length.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from pathlib import Path

from router import app

PERIOD_S = 0.005
MOST = 1 << 20  # samples that are kept


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


def main() -> int:
    from deploy.cli import main as run_command

    probe = Probe(Path(sys.argv[1]))
    start = app.start_background

    def with_probe(*parts: object) -> list[asyncio.Task[None]]:
        return [*start(*parts), asyncio.create_task(probe.run())]  # type: ignore[arg-type]  # passed on as it came

    app.start_background = with_probe  # type: ignore[assignment]
    return run_command(["router", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
