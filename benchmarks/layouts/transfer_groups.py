"""How fast KV pages travel through a process group (`gloo`, staged, taken a few at a time, digests
checked) beside a bare send and receive of the same bytes over gloo, between two processes on this machine.

    python -m benchmarks.layouts.transfer_groups [--json FILE] [--rounds N] [--mib 8,16,64]

Both are timed from the request until the receiver has everything; they take turns, and ratios are medians of the
rounds' own ratios. The sender's digests are made before, as they are while later layers are computed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from benchmarks.report import parser_with_json
from benchmarks.transfer import KEY, MIB, PAGE_BYTES, make_pool
from shared.core.errors import HandoffFailed
from shared.device.malloc import keep_freed_memory
from shared.node.loop.group_table import END_S, WINDOW
from shared.transfer.group_thread import GroupThread
from shared.transfer.link_store import LinkStore
from shared.transfer.staged import StagedReceiver, StagedSender
from shared.transfer.torch_groups import RECEIVER, SENDER, GlooGroup
from shared.transfer.transports import open_group
from shared.wire.messages import Broken, Ready, StoreEntry, Take
from shared.wire.peers import Inbound, PeerUp, Received
from shared.wire.zeromq.link import NodeLinks

HOST = "127.0.0.1"
STAGED_GROUP, BARE_GROUP = 1, 2
PAGES_PER_READY = 8
NEEDED = 0.6
HELLO = StoreEntry(BARE_GROUP, "hello", b"")


class Ends:
    """This process's end of both groups, and the link on which they are introduced."""

    def __init__(self, links: NodeLinks, peer: str, rank: int, early: Sequence[Inbound] = ()) -> None:
        self.links, self.peer = links, peer
        self.staged = open_group("gloo", rank, HOST, torch.device("cpu"), links.wakeup.set)
        self.bare = GlooGroup(HOST)
        self._told: deque[tuple[str, bytes]] = deque()
        self._store = LinkStore(lambda *entry: self._told.append(entry))
        connecting = threading.Thread(target=self.bare.connect, args=(self._store, rank))
        connecting.start()
        self._take(early)
        self.staged.post([torch.zeros(1, dtype=torch.uint8)])
        self.early: list[Take] = []  # the other end may be ready before we are
        while connecting.is_alive() or not self.staged.take_finished():
            self.early += self.introduce()

    def introduce(self) -> list[Take]:
        """Entries both ways; gives what was asked for meanwhile."""
        entries = [(STAGED_GROUP, *entry) for entry in self.staged.take_entries()]
        while self._told:
            entries.append((BARE_GROUP, *self._told.popleft()))
        for entry in entries:
            self.links.send(self.peer, StoreEntry(*entry))
        return self._take(self.links.poll(0.01))

    def _take(self, inbox: Sequence[Inbound]) -> list[Take]:
        takes = []
        for inbound in inbox:
            message = inbound.message if isinstance(inbound, Received) else None
            if isinstance(message, StoreEntry):
                (self._store if message.group == BARE_GROUP else self.staged).deliver(message.name, message.value)
            elif isinstance(message, Take):
                takes.append(message)
            elif isinstance(message, Broken):
                raise SystemExit
        return takes


def serve(endpoint: str, num_pages: int) -> None:
    """Sends what is asked for, until it is told to end."""
    pool = make_pool(num_pages + 1, shared=False)
    sender, links = StagedSender("gloo", pool), NodeLinks("p", 1)
    links.dial("d@1", endpoint)
    while not any(isinstance(inbound, PeerUp) for inbound in links.poll(1.0)):
        continue
    links.send("d@1", HELLO)
    ends = Ends(links, "d@1", SENDER)
    takes = ends.early
    while True:
        for take in takes:
            if take.group == BARE_GROUP:
                ends.bare.finish(ends.bare.start([pool.pages_bytes[1 : take.pages[0] + 1].view(-1)]))
            else:
                ends.staged.post(sender.views(take))
        ends.staged.take_finished()
        takes = ends.introduce()


class Receiver:
    def __init__(self, ends: Ends, num_pages: int) -> None:
        self._ends = ends
        self.pool = make_pool(num_pages + 1, shared=False)
        self._receiver = StagedReceiver("gloo", self.pool)
        self._order = 0
        described = StagedSender("gloo", self.pool).describe(range(1, num_pages + 1))  # both pools hold the same
        self._readies = [part.ready(KEY, 1, 0) for part in described.split(PAGES_PER_READY)]

    def bare(self, n: int) -> None:
        self._ends.links.send(self._ends.peer, Take(BARE_GROUP, 0, [n], 0, 0))
        group = self._ends.bare
        group.finish(group.start([self.pool.pages_bytes[1 : n + 1].view(-1)]))

    def gloo(self, n: int) -> None:
        waiting = deque(self._readies[: -(-n // PAGES_PER_READY)])
        asked: deque[Ready] = deque()
        self._ask(waiting, asked)
        while asked:
            self._ends.links.poll(10.0)
            come = [(asked.popleft(), staging) for staging in self._ends.staged.take_finished()]
            self._ask(waiting, asked)  # before the pulls, as a node does, whose pulls are its transfer stream's
            for ready, staging in come:
                self._receiver.pull(ready, staging, ready.pages)
            assert not self._ends.staged.error, self._ends.staged.error

    def _ask(self, waiting: deque[Ready], asked: deque[Ready]) -> None:
        while waiting and len(asked) < WINDOW:
            ready = waiting.popleft()
            self._ends.links.send(self._ends.peer, Take(STAGED_GROUP, self._order, ready.pages, 0, 0))
            self._order += 1
            self._ends.staged.post(self._receiver.make_staging(ready))
            asked.append(ready)


def measure(receiver: Receiver, sizes_mib: list[int], rounds: int) -> dict[str, dict[str, float]]:
    figures = {}
    for mib in sizes_mib:
        n = PAGES_PER_READY * max(1, round(mib * MIB / PAGE_BYTES / PAGES_PER_READY))
        seconds: dict[str, list[float]] = {"bare": [], "gloo": []}
        for i in range(rounds + 1):
            for name, run in (("bare", receiver.bare), ("gloo", receiver.gloo)):
                started = time.perf_counter()
                run(n)
                if i:  # the first round warms up
                    seconds[name].append(time.perf_counter() - started)
        row = {f"{name} GB/s": n * PAGE_BYTES / statistics.median(times) / 1e9 for name, times in seconds.items()}
        row["gloo / bare"] = statistics.median(b / t for b, t in zip(seconds["bare"], seconds["gloo"], strict=True))
        row["gloo / bare, best rounds"] = min(seconds["bare"]) / min(seconds["gloo"])
        figures[f"{mib} MiB"] = row
    return figures


def wait_for_hello(links: NodeLinks) -> list[Inbound]:
    """With what came behind it."""
    batch: list[Inbound] = []
    while not any(isinstance(inbound, Received) for inbound in batch):
        batch = links.poll(1.0)
    return batch


def start(num_pages: int) -> tuple[subprocess.Popen[bytes], Receiver, GroupThread]:
    links = NodeLinks("d", 1)
    words = ("--serve", links.endpoint, "--pages", str(num_pages))
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.layouts.transfer_groups", *words])
    ends = Ends(links, "p@1", RECEIVER, early=wait_for_hello(links))
    return child, Receiver(ends, num_pages), ends.staged


def main() -> int:
    parser = parser_with_json("Speed of process groups")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--mib", default="8,16,64")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--pages", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every node does
    if args.serve:
        serve(args.serve, args.pages)
    sizes = [int(size) for size in args.mib.split(",")]
    child, receiver, group = start(PAGES_PER_READY * (1 + round(max(sizes) * MIB / PAGE_BYTES / PAGES_PER_READY)))
    try:
        figures = measure(receiver, sizes, args.rounds)
    finally:
        child.kill()
        child.wait()
        group.abort(HandoffFailed("the end"))
        group.join(END_S)
    for size, row in figures.items():
        print(size)
        for name, value in row.items():
            short = name == "gloo / bare" and value < NEEDED
            print(f"    {name:28} {value:7.2f}{f'  SHORT of {NEEDED}' if short else ''}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
