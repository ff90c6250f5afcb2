"""What the router costs, in CPU time and not by the clock: tokens without and with sockets, opening a request, a tick,
a node's loss, and the Hellos of many nodes.

    python -m benchmarks.router [--json F]              this checkout
    PYTHONPATH=OTHER:. python -P benchmarks/router.py   another one, by this file

Tokens come in steps of 32 rows; 64 streams run on two decode nodes. Without sockets their way is: bytes, message,
dispatcher, journal, mailbox, and the task that waits there (`alone_us`: as whole_us, in steps of one row). With sockets
the nodes are another process, whose CPU does not count, and each step is a message that wakes the router.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.report import parser_with_json, report
from router.dispatch.gateway import Gateway
from router.policy.interface import Wanted
from router.policy.least_load import LeastLoad
from router.policy.placement import Placer
from router.requests.mailbox import Mailbox
from router.requests.new_request import NewRequest
from shared.core.sampling_params import SamplingParams
from shared.observe.log import Logger
from shared.observe.metrics import ClusterMetrics
from shared.wire.codec import decode, encode
from shared.wire.messages import Generate, Heartbeat, Hello, Key, Message, NodeLoad, TokenRun, Tokens
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received, peer_name
from shared.wire.zeromq.link import NodeLinks, RouterLink
from tests.support.worlds.router_rig import RouterRig, hello

DECODE_NODES = ("d0", "d1")
ROWS = 32  # of a step
STEPS = 400  # of each node
PAUSE_S = 0.002  # between a node's steps, with sockets
CONTEXT = 1 << 20
PROMPT = list(range(600))
NUM_OPEN = 2000
HANDOFFS = "handoff_cost_seconds"
REPEATS = 200  # of what is over in microseconds
AT_ONCE = 5  # requests opened between two heartbeats of a node


class StandIn:
    """In a link's place: keeps the Generates and takes everything."""

    endpoint = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.generates: list[Generate] = []

    async def receive(self) -> Sequence[Inbound]:
        return []

    def send(self, peer: str, message: Message) -> bool:
        if isinstance(message, Generate):
            self.generates.append(message)
        return True


class Router:
    """A gateway around the parts of the unit tests' rig, whose clock stands still."""

    def __init__(self, link: StandIn | RouterLink) -> None:
        self.rig = RouterRig(max_open=1 << 16, max_queued=1 << 16, max_attempts=3, resume_wait_s=10.0)
        log = Logger("router", io.StringIO(), level="error")
        parts = (self.rig.registry, self.rig.dispatcher, link, ClusterMetrics(CollectorRegistry()), log)
        self.gateway = Gateway(("r", 9), *parts, lambda: self.rig.now)

    def hear(self, message: Hello | Heartbeat | Tokens) -> None:
        self.gateway.handle(Received(peer_name(message.node_id, message.epoch), message))

    def populate(self, num_nodes: int) -> None:
        """Half of them decode, half prefill, each under some load of its own. A single node does both."""
        for said in hellos(num_nodes):
            self.hear(said)
        self.report(num_nodes)

    def report(self, num_nodes: int) -> None:
        """Heartbeats of all nodes: each has room for AT_ONCE more requests, so that none waits in the queue."""
        rng = random.Random(num_nodes)
        for said in hellos(num_nodes):
            self.hear(Heartbeat(said.node_id, said.epoch, load(rng), False))

    def open(self) -> Mailbox:
        return self.gateway.open([NewRequest(PROMPT, 1, SamplingParams(max_tokens=STEPS + 1), seed=7)])


def hellos(num_nodes: int) -> list[Hello]:
    return [hello(("decode", "prefill")[index % 2], f"n{index}", context=CONTEXT) for index in range(num_nodes)]


def load(rng: random.Random) -> NodeLoad:
    running, waiting = rng.randrange(ROWS), rng.randrange(4)
    rows = {"free": ROWS - running, "running": running, "prefilling": 0, "granted": 0, "held": 0}
    pages = dict.fromkeys(("free", "cached", "active", "granted", "held"), 100)
    tokens = rng.sample(range(10, 600), 2)
    counters = {"prompt_steps": 50.0, "prompt_step_tokens": 50.0 * tokens[0], "prompt_step_seconds": 0.05 * tokens[1]}
    return NodeLoad(500, pages, ROWS, rows, waiting, 600 * waiting, 1, counters, {HANDOFFS: [0.004] * 4}, {}, "")


def cpu_s(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


# ---- tokens


class Streams:
    """64 open requests, and what their nodes will send: a token for each row, step by step, `rows` in a message."""

    def __init__(self, rows: int) -> None:
        link = StandIn()
        self.router = Router(link)
        for node_id in DECODE_NODES:
            self.router.hear(hello("decode", node_id, context=CONTEXT))
        self.mailboxes = [self.router.open() for _ in range(ROWS * len(DECODE_NODES))]
        keys = [generate.key for generate in link.generates]  # the nodes take turns
        by_node = [self._steps(name, keys[index::2], rows) for index, name in enumerate(DECODE_NODES)]
        self.arrivals = [arrival for turn in zip(*by_node, strict=True) for arrival in turn]

    @staticmethod
    def _steps(node_id: str, keys: Sequence[Key], rows: int) -> list[tuple[str, bytes]]:
        parts = [keys[first : first + rows] for first in range(0, len(keys), rows)]
        return [
            (f"{node_id}@1", encode(Tokens(node_id, 1, [TokenRun(key, step, [step], []) for key in part], [])))
            for step in range(STEPS)
            for part in parts
        ]


async def read_all(mailbox: Mailbox) -> None:
    """The task of one stream: it is woken for each token, as an answer's is."""
    count = 0
    while count < STEPS:
        for news in await mailbox.take_news():
            count += len(news.ids)  # type: ignore[union-attr]


async def whole_way(rows: int) -> float:
    """From the bytes of a message to the task that waits for its tokens."""
    streams = Streams(rows)
    readers = [asyncio.create_task(read_all(mailbox)) for mailbox in streams.mailboxes]
    await asyncio.sleep(0)
    began, gateway = time.process_time(), streams.router.gateway
    for peer, data in streams.arrivals:
        gateway.handle(Received(peer, decode(data)))
        await asyncio.sleep(0)
    await asyncio.gather(*readers)
    return time.process_time() - began


def tokens_without_sockets() -> dict[str, float]:
    streams = Streams(ROWS)
    messages: list[Received] = []
    decode_s = cpu_s(lambda: messages.extend(Received(peer, decode(data)) for peer, data in streams.arrivals))
    dispatch_s = cpu_s(lambda: list(map(streams.router.gateway.handle, messages)))
    whole_s, alone_s = uvloop.run(whole_way(ROWS)), uvloop.run(whole_way(1))
    return per_token({"decode": decode_s, "dispatch": dispatch_s, "whole": whole_s, "alone": alone_s})


def per_token(seconds: dict[str, float]) -> dict[str, float]:
    return {f"{name}_us": 1e6 * value / (STEPS * ROWS * len(DECODE_NODES)) for name, value in seconds.items()}


async def tokens_with_sockets() -> dict[str, float]:
    link = RouterLink("tcp://127.0.0.1:0")
    router = Router(link)
    same_code = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    node = subprocess.Popen([sys.executable, "-P", __file__, "--nodes-of", link.endpoint], env=same_code)
    try:
        gateway = asyncio.create_task(router.gateway.run())
        while len(router.rig.registry) < len(DECODE_NODES):
            await asyncio.sleep(0.01)
        mailboxes = [router.open() for _ in range(ROWS * len(DECODE_NODES))]
        began = time.process_time()
        await asyncio.gather(*map(read_all, mailboxes))
        whole = time.process_time() - began
        gateway.cancel()
        await asyncio.wait([gateway])
        return per_token({"whole": whole})
    finally:
        node.kill()
        node.wait()
        link.close()


def run_nodes(endpoint: str) -> None:
    """The nodes' process: answers each node's requests with its steps, and stays until it is killed."""
    nodes = [SteppingNode(node_id, endpoint) for node_id in DECODE_NODES]
    while True:
        for node in nodes:
            node.round()
        time.sleep(PAUSE_S)


class SteppingNode:
    """Says Hello, waits until it has a full batch, and sends its steps."""

    def __init__(self, node_id: str, endpoint: str) -> None:
        self._links = NodeLinks(node_id, 1)
        self._links.dial("router", endpoint)
        self._node_id = node_id
        self._keys: list[Key] = []
        self._step = 0

    def round(self) -> None:
        for inbound in self._links.poll(0.0):
            if isinstance(inbound, PeerUp):
                self._links.send("router", hello("decode", self._node_id, context=CONTEXT))
            elif isinstance(inbound, Received) and isinstance(inbound.message, Generate):
                self._keys.append(inbound.message.key)
        if len(self._keys) == ROWS and self._step < STEPS:
            runs = [TokenRun(key, self._step, [self._step % 1000], []) for key in self._keys]
            self._links.send("router", Tokens(self._node_id, 1, runs, []))
            self._step += 1


# ---- requests


def opening(num_nodes: int) -> dict[str, float]:
    """Opening a request, closing it, and the choice of its nodes alone."""
    link = StandIn()
    router = Router(link)
    router.populate(num_nodes)
    opened: list[Mailbox] = []
    open_s = 0.0
    while len(opened) < REPEATS:
        router.report(num_nodes)
        open_s += cpu_s(lambda: opened.extend(router.open() for _ in range(AT_ONCE)))
    assert len(link.generates) == REPEATS, "requests wait in the router's queue"
    close_s = cpu_s(lambda: [router.gateway.close(mailbox) for mailbox in opened])
    placer = Placer(router.rig.registry, LeastLoad(), -1)  # by cost; a checkout without that hands all over
    most = len(PROMPT) + STEPS
    place_s = cpu_s(lambda: [placer.place(Wanted(len(PROMPT)), (), most) for _ in range(REPEATS)])
    seconds = {"open": open_s, "close": close_s, "place": place_s}
    return {f"{name}_us": 1e6 * value / REPEATS for name, value in seconds.items()}


def bodies() -> dict[str, float]:
    """What a body costs; nothing in a checkout that has no such API."""
    try:
        from benchmarks.bodies import bodies as measured
    except ImportError:
        return {}
    return measured(cpu_s)


def crowded() -> dict[str, float]:
    """A tick with 2,000 open requests on 100 nodes, and the loss of one of these nodes."""
    router = Router(StandIn())
    router.populate(100)
    for index in range(NUM_OPEN):
        if index % AT_ONCE == 0:
            router.report(100)
        router.open()
    tick_s = cpu_s(lambda: [router.gateway.tick() for _ in range(REPEATS)]) / REPEATS
    lost = [cpu_s(lambda name=f"n{index}@1": router.gateway.handle(PeerClosed(name))) for index in range(8)]
    return {"tick_ms": 1e3 * tick_s, "loss_ms": 1e3 * statistics.mean(lost)}


def all_hellos(num_nodes: int) -> float:
    router = Router(StandIn())
    said = hellos(num_nodes)
    return 1e3 * cpu_s(lambda: [router.hear(one) for one in said])


def measure(node_counts: Sequence[int]) -> dict[str, object]:
    return {
        "token": tokens_without_sockets(),
        "token_with_sockets": uvloop.run(tokens_with_sockets()),
        "request": {f"nodes_{count}": opening(count) for count in (1, 10, 100)},
        "body": bodies(),
        "crowded": crowded(),
        "hellos": {f"nodes_{count}_ms": all_hellos(count) for count in node_counts},
    }


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--hellos", type=int, nargs="*", default=[100, 200, 400], help="of how many nodes")
    parser.add_argument("--nodes-of", metavar="ENDPOINT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.nodes_of:
        run_nodes(args.nodes_of)
    report(measure(args.hellos), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
