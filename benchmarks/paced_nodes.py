"""Run fake nodes as a process of its own, for measurements of a router: they compute nothing and send tokens at a pace.

    python -m benchmarks.paced_nodes ENDPOINT --tokens-per-s 2000 --streams 10000 [--nodes 4] [--prefill 0] [--rows 32]

With `--prefill` there are prefill nodes too: they send the first tokens of the prompts that the router hands over, and
pass these requests to the decode nodes. Each stream gets its first token at once, and then its share of
`--tokens-per-s`: the total, once `--streams` are open. A message has the tokens of up to `--rows` streams, as a step of
a batch has. SIGTERM ends the process, which then prints the numbers of requests, tokens and messages, and writes the
times of all heartbeats to the file `--beats`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Fingerprint,
    Generate,
    Heartbeat,
    Hello,
    Key,
    NodeLoad,
    SequenceEnd,
    TokenRun,
)
from shared.wire.messages import Tokens as TokensMessage
from shared.wire.peers import PeerUp, Received
from shared.wire.zeromq.link import NodeLinks

FINGERPRINT = Fingerprint(PROTOCOL_VERSION, 1, "m", "w", "int", 16, "paged", "none", "build", "llguidance")
CONTEXT = 1 << 17
ROWS_TOTAL = 4096
PAGES_TOTAL = 1 << 20
BEAT_S = 0.5
PAUSE_S = 0.002
FIRST_ID, NUM_IDS = 40, 50  # short texts in every vocabulary, and never the end


@dataclass(eq=False, slots=True)
class Row:
    key: Key
    max_tokens: int
    decode_node: str  # of a hand-off; else ""
    position: int = 0
    is_over: bool = False


class PacedNode:
    """One node and its connection. `rows` are in the order in which they get their next token."""

    def __init__(self, role: str, node_id: str, endpoint: str, beat_s: float) -> None:
        self._links = NodeLinks(node_id, 1)
        self._beat_s = beat_s
        self.beats: list[float] = []  # when each was sent
        self._links.dial("router", endpoint)
        self._role = role
        self.node_id = node_id
        self._by_key: dict[Key, Row] = {}
        self._connection = 0
        self._beat_at = 0.0
        self.rows: deque[Row] = deque()
        self.fresh: deque[Row] = deque()  # rows without a token
        self.num_requests = self.num_hand_offs = self.num_tokens = self.num_messages = 0

    def hear(self, now: float) -> None:
        for inbound in self._links.poll(0.0):
            if isinstance(inbound, PeerUp):
                self._connection += 1
                self._links.send("router", self._hello())
            elif isinstance(inbound, Received):
                self._take(inbound.message)
        if now >= self._beat_at:
            self._beat_at = now + self._beat_s
            self.beats.append(time.monotonic())
            self._links.send("router", Heartbeat(self.node_id, 1, self._load(), False))

    def _hello(self) -> Hello:
        return Hello(
            self._role, self.node_id, 1, self._links.endpoint, FINGERPRINT, CONTEXT, ROWS_TOTAL, "h", ["zmq"],
            self._connection, [],
        )  # fmt: skip

    def _load(self) -> NodeLoad:
        rows = {"free": ROWS_TOTAL - len(self._by_key), "running": len(self._by_key)}
        return NodeLoad(PAGES_TOTAL, {"free": PAGES_TOTAL}, ROWS_TOTAL, rows, 0, 0, 1, {}, {}, {}, "")

    def _take(self, message: object) -> None:
        if isinstance(message, Generate):
            row = Row(message.key, message.sampling.max_tokens, message.decode_node, len(message.output_ids[0]))
            self._by_key[message.key] = row
            self.fresh.append(row)
            self.num_requests += 1
            self.num_hand_offs += bool(row.decode_node)
        elif isinstance(message, Abort):
            doomed = self._by_key.pop(message.key, None)
            if doomed is not None:
                doomed.is_over = True

    @property
    def num_open(self) -> int:
        return len(self._by_key)

    def install(self, row: Row) -> None:
        """Take over a request that a prefill node has begun."""
        self._by_key[row.key] = row
        self.rows.append(row)

    def step(self, source: deque[Row], count: int, peers: Mapping[str, PacedNode]) -> int:
        """Send one token of each of the next `count` rows of `source`. Return the number of tokens."""
        chosen: list[Row] = []
        while source and len(chosen) < count:
            row = source.popleft()
            if not row.is_over:
                chosen.append(row)
        if not chosen:
            return 0
        runs = [TokenRun(row.key, row.position, [FIRST_ID + row.position % NUM_IDS], []) for row in chosen]
        ends = []
        for row in chosen:
            row.position += 1
            if row.position >= row.max_tokens:
                row.is_over = True
                del self._by_key[row.key]
                ends.append(SequenceEnd(row.key, "length", row.position, 0, "", ""))
            elif row.decode_node in peers and row.decode_node != self.node_id:
                del self._by_key[row.key]
                peers[row.decode_node].install(row)
            else:
                self.rows.append(row)
        self._links.send("router", TokensMessage(self.node_id, 1, runs, ends))
        self.num_tokens += len(chosen)
        self.num_messages += 1
        return len(chosen)

    def close(self) -> None:
        self._links.close()


class Pace:
    """Decides how many tokens are due. A pace that the process can't keep is not made up for later."""

    def __init__(self, tokens_per_s: float, streams: int) -> None:
        self._per_stream = tokens_per_s / streams
        self._most = tokens_per_s
        self._due = 0.0
        self._before = time.monotonic()

    def due(self, now: float, num_open: int) -> int:
        rate = min(self._most, self._per_stream * num_open)
        self._due = min(self._due + rate * (now - self._before), rate)
        self._before = now
        return int(self._due)

    def sent(self, count: int) -> None:
        self._due -= count


def serve(nodes: Mapping[str, PacedNode], pace: Pace, rows: int, stopping: list[int]) -> None:
    turns = itertools.cycle(nodes.values())
    while not stopping:
        now = time.monotonic()
        for node in nodes.values():
            node.hear(now)
            while node.fresh:
                node.step(node.fresh, rows, nodes)
        num_open = sum(node.num_open for node in nodes.values())
        num_busy = sum(bool(node.rows) for node in nodes.values())
        least = min(rows, max(1, num_open // max(1, num_busy)))
        while pace.due(now, num_open) >= least and any(node.rows for node in nodes.values()):
            node = next(turns)
            pace.sent(node.step(node.rows, least, nodes))
        time.sleep(PAUSE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("--tokens-per-s", type=float, required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=0, help="prefill nodes beside them")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--beat-s", type=float, default=BEAT_S)
    parser.add_argument("--beats", type=Path)
    args = parser.parse_args()
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    roles = ["decode"] * args.nodes + ["prefill"] * args.prefill
    made = [PacedNode(role, f"{role}-{index}", args.endpoint, args.beat_s) for index, role in enumerate(roles)]
    nodes = {node.node_id: node for node in made}
    try:
        serve(nodes, Pace(args.tokens_per_s, args.streams), args.rows, stopping)
    finally:
        if args.beats is not None:
            args.beats.write_text(json.dumps({node.node_id: node.beats for node in made}))
        names = ("num_requests", "num_hand_offs", "num_tokens", "num_messages")
        print(json.dumps({name: sum(getattr(node, name) for node in nodes.values()) for name in names}), flush=True)
        for node in nodes.values():
            node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
