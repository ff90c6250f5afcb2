"""Mutated request bodies for every endpoint that takes one, against a whole cluster on HashLM. No answer may be a 5xx
but a 503, nobody may hang, end or trip, memory must stay flat, and every page and row must come back.

    make bodies                 make bodies BODIES=20000 SEED=7
    python -m tests.chaos.bodies --seed 7 --first 1234 --bodies 1          one body again

Sampler, tokenizer, field, not JSON: how far the bodies came.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil
import uvloop

from router.api.site.tables import ALL_TABLES
from tests.support.bodies.body_exchange import Client, Fault
from tests.support.bodies.body_requests import Request, make_request
from tests.support.clusters.cluster import Cluster, baton_up

ROLES = ("router", "prefill", "decode")
# Answers of no given length end soon; a small pool is full before memory counts; a busy machine loses no node. Used
# tickets are remembered for a minute beyond a request's time: of ten minutes they would still be growing here.
FLAGS = ("--max-context", "512", "--kv-bytes", "2MiB", "--node-silence-s", "60", "--silence-s", "60",
         "--request-timeout-s", "60",
         "--max-open-requests", "16", "--max-queued-requests", "4")  # fmt: skip
NUM_CLIENTS = 24  # enough to meet both limits now and then
WARM_UP, MOST_WARM_UP = 0.1, 5_000  # share of the bodies before memory is measured, and the most of them
MOST_GROWTH_MIB = 32.0
LEAST_VALID, LEAST_DEEP = 1 / 3, 1 / 10  # shares of valid JSON, and of bodies that template or sampler had
FEWEST_FOR_SHARES = 1000
MOST_FAULTS = 20
TELL_S = 10.0
MIB = 1 << 20
SHOWN = 3000  # bytes of a body that is at fault
TROUBLE = re.compile(r"^.*(?: ERROR |Traceback|Exception in ASGI).*$", re.MULTILINE)


@dataclass
class Tally:
    """What was sent and what came of it. `faults`: for people to read."""

    sent: int = 0
    valid: int = 0
    paths: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def deep(self) -> int:
        """Bodies that came to the template or the tokenizer behind it, and those that got tokens."""
        return self.ends["sampler"] + self.ends["tokenizer"]

    def note(self, request: Request, end: str) -> None:
        self.sent += 1
        self.valid += is_json(request.body)
        self.paths[request.path] += 1
        self.ends[end] += 1

    def shares(self) -> str:
        sent = max(1, self.sent)
        return f"{self.valid / sent:.1%} valid JSON, {self.deep / sent:.1%} reached template or sampler"

    def has_shares(self) -> bool:
        if self.sent < FEWEST_FOR_SHARES:
            return True
        return self.valid >= LEAST_VALID * self.sent and self.deep >= LEAST_DEEP * self.sent


class Run:
    """Clients that take the next body each, as long as there are any."""

    def __init__(self, cluster: Cluster, seed: int, bodies: range, model: str) -> None:
        self.tally = Tally()
        self._seed = seed
        self._bodies = bodies
        self._model = model
        self._indices: Iterator[int] = iter(bodies)
        self._processes = {role: psutil.Process(cluster.node_pid(role)) for role in ROLES}
        self._at = urlsplit(cluster.url)
        self._start = time.monotonic()
        self.warm: dict[str, float] = {}

    async def run(self) -> None:
        telling = asyncio.create_task(self._tell())
        try:
            await asyncio.gather(*(self._one_after_another() for _ in range(NUM_CLIENTS)))
        finally:
            telling.cancel()

    async def _one_after_another(self) -> None:
        client = Client(str(self._at.hostname), int(self._at.port or 0))
        for index in self._indices:
            request = make_request(self._seed, index, ALL_TABLES, self._model)
            try:
                end = await client.ask(request)
            except Fault as fault:
                end = "FAULT"
                self._found(request, fault)
                await client.close()
            self.tally.note(request, end)
            if not self.warm and self.tally.sent >= min(WARM_UP * len(self._bodies), MOST_WARM_UP):
                self.warm = self.memory()
            if len(self.tally.faults) >= MOST_FAULTS:
                break
        await client.close()

    def _found(self, request: Request, fault: Fault) -> None:
        wire = request.wire
        cut = f" (the first {SHOWN} of {len(wire)} bytes)" if len(wire) > SHOWN else ""
        again = f"python -m tests.chaos.bodies --seed {self._seed} --first {request.index} --bodies 1"
        self.tally.faults.append(f"{fault}\n  {wire[:SHOWN]!r}{cut}\n  again: {again}")
        print(f"FAULT {self.tally.faults[-1]}", flush=True)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            self.tell()

    def tell(self) -> None:
        """Print how far the run is, how fast, and what the processes hold."""
        rate = self.tally.sent / (time.monotonic() - self._start)
        held = ", ".join(f"{role} {mib:.1f}" for role, mib in self.memory().items())
        print(f"{self.tally.sent} bodies, {rate:.0f}/s; {self.tally.shares()}; {held} MiB", flush=True)
        print(f"  {dict(self.tally.ends.most_common())}", flush=True)

    def memory(self) -> dict[str, float]:
        """Resident MiB of each process that has not ended."""
        alive = {role: process for role, process in self._processes.items() if process.is_running()}
        return {role: process.memory_info().rss / MIB for role, process in alive.items()}

    def ended(self) -> list[str]:
        return [role for role, process in self._processes.items() if not process.is_running()]

    def growth(self) -> dict[str, float]:
        return {role: mib - self.warm.get(role, mib) for role, mib in self.memory().items()}


def is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def problems(run: Run, cluster: Cluster) -> list[str]:
    """Return what is wrong once all clients have gone."""
    found = [f"{len(run.tally.faults)} wrong answers, see above"] if run.tally.faults else []
    found += [f"{role} has ended" for role in run.ended()]
    try:
        cluster.eventually(cluster.at_rest, "nothing is open, every page and row is back")
        if not cluster.pages_partition():
            found.append("the pages do not add up")
    except AssertionError as error:
        found.append(str(error))
    if not run.tally.has_shares():
        found.append(f"too few came far: {run.tally.shares()}")
    found += [f"{role} grew by {mib:.1f} MiB" for role, mib in run.growth().items() if mib > MOST_GROWTH_MIB]
    log = cluster.log_path.read_text("utf-8", "replace")
    return found + [line[0] for line in itertools.islice(TROUBLE.finditer(log), MOST_FAULTS)]


def send_all(folder: Path, seed: int, bodies: range, model: str = "hashlm") -> list[str]:
    """Start a cluster, send the bodies, and return what is wrong."""
    with baton_up(folder / "up.log", "--model", model, *FLAGS) as cluster:
        run = Run(cluster, seed, bodies, model)
        uvloop.run(run.run())
        run.tell()
        found = problems(run, cluster)
        print("bodies by endpoint:", dict(run.tally.paths))
        print("growth since the warm-up:", {role: f"{mib:.1f} MiB" for role, mib in run.growth().items()}, flush=True)
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="mutated request bodies")
    parser.add_argument("--bodies", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0, help="number of the first body")
    parser.add_argument("--model", default="hashlm", help="another one has a real template and tokenizer, and is slow")
    options = parser.parse_args(argv)
    bodies = range(options.first, options.first + options.bodies)
    print(f"seed {options.seed}, bodies {bodies.start} to {bodies.stop - 1}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = send_all(Path(folder), options.seed, bodies, options.model)
    print("\n".join(found) or "nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
