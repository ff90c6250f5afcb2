"""How fast KV pages travel: shm beside memcpy, zmq beside a raw socket, zmq with keys beside zmq without, between two
processes on this machine.

    python -m benchmarks.transfer [--json FILE] [--rounds N] [--mib 1,8,64]

Each figure is the median over rounds in which all ways take turns; ratios are medians of the rounds' own ratios, so
that a busy machine slows both sides; "best rounds" is what the machine can do when nothing else runs. A transfer is
timed from the request until the receiver has copied AND checked every page; the sender's digests (`describe`, done
while later chunks compute) have a row of their own. "seal" only encrypts the pages on one core, with the libsodium that
pyzmq brings. One thread of libzmq encrypts and sends a connection's bytes in turn, so the times of "seal" and "zmq tcp"
add up to about that of "zmq keys".
"""

from __future__ import annotations

import argparse
import ctypes
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zmq

from benchmarks.report import parser_with_json
from shared.core.keys import RequestKey
from shared.device.malloc import keep_freed_memory
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.transfer.frames import FrameReceiver, FrameSender
from shared.transfer.shm import ShmReceiver, ShmSender
from shared.wire.codec import to_wire
from shared.wire.keys.key_files import (
    ALLOWED,
    NODE,
    AllowedKeys,
    KeyEntry,
    make_folder,
    new_pair,
    write_pair,
    write_private,
)
from shared.wire.keys.keyring import KeyRing
from shared.wire.messages import Drain, Ready
from shared.wire.peers import Received
from shared.wire.zeromq.link import NodeLinks
from shared.wire.zeromq.link_options import LinkOptions

MIB = 1 << 20
PAGE_BYTES = 368_640  # SmolLM2-135M: 30 layers x (k, v) x 3 heads x 16 slots x 64 x bfloat16
PAGES_PER_MESSAGE = 4  # the receiver copies one message while the next comes in
KEY = to_wire(RequestKey("bench", 1, "rid", 0, 0))
PEER_OF = {"tcp": "d@1", "keys": "d@2"}
NEEDED = {"shm": 0.5, "zmq tcp": 0.6}  # of its baseline, from 8 MiB on
BASELINE = {"shm": "memcpy", "zmq tcp": "raw tcp", "zmq keys": "zmq tcp", "seal": "zmq tcp"}
WAYS = ("tcp", "keys")  # keys: over TCP, encrypted


def make_pool(num_pages: int, shared: bool) -> KVPool:
    pool = KVPool((PlaneSpec("kv", (PAGE_BYTES,), torch.uint8),), num_pages, 16, shared=shared)
    np.copyto(pool.pages_bytes.numpy(), np.random.default_rng(1).integers(0, 256, PAGE_BYTES, dtype=np.uint8))
    return pool


class Seal:
    """Encrypts as CURVE does: XSalsa20 and Poly1305, with a key that both ends computed before."""

    def __init__(self) -> None:
        (library,) = Path(zmq.__file__).parents[1].glob("pyzmq.libs/libsodium*")
        self._sodium = ctypes.CDLL(str(library))
        assert self._sodium.sodium_init() >= 0
        self._key = bytes(32)
        self._out = ctypes.create_string_buffer(PAGE_BYTES + 16)

    def encrypt(self, page: np.ndarray) -> None:
        address, size = ctypes.c_void_p(page.ctypes.data), ctypes.c_ulonglong(page.nbytes)
        failed = self._sodium.crypto_box_easy_afternm(self._out, address, size, bytes(24), self._key)
        assert not failed


# sender process


def serve(folder: Path, num_pages: int) -> None:
    """Answers requests of the measuring process until its stdin closes: `<way> <pages>` per line."""
    pool = make_pool(num_pages + 1, shared=True)
    shm = ShmSender(pool).describe(range(1, num_pages + 1)).ready(KEY, 1, 0)
    described = FrameSender(pool).describe(range(1, num_pages + 1))
    plain, keyed = NodeLinks("p", 1), NodeLinks("p", 1, options=with_keys(folder, "p"))
    links = {"tcp": plain, "keys": keyed}
    for way in WAYS:
        links[way].dial(PEER_OF[way], (folder / way).read_text())
    raw = connect_raw(int((folder / "raw").read_text()))
    for way in WAYS:
        while not links[way].send(PEER_OF[way], shm):
            links[way].poll(0.1)
    for line in sys.stdin:
        kind, way, count = line.split(" ")
        if kind == "zmq":
            for part in described.split(int(count))[0].split(PAGES_PER_MESSAGE):
                links[way].send(PEER_OF[way], part.ready(KEY, 1, part.pages[0] - 1), part.frames)
            links[way].poll(0)
        else:
            raw.sendall(pool.pages_bytes[1 : int(count) + 1].numpy().reshape(-1).data)


def with_keys(folder: Path, name: str) -> LinkOptions:
    return LinkOptions(ring=KeyRing(folder / "secrets", NODE, name))


def make_keys(folder: Path) -> None:
    make_folder(folder)
    pairs = {name: new_pair() for name in ("p", "d")}
    for name, pair in pairs.items():
        write_pair(folder, name, pair)
    entries = tuple(KeyEntry(NODE, name, pair.public) for name, pair in pairs.items())
    write_private(folder / ALLOWED, AllowedKeys(entries).text)


def connect_raw(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


# measuring process


@dataclass
class Receiver:
    """All ways into `dst`, each a callable that moves and checks the first n pages."""

    child: subprocess.Popen[bytes]
    src: KVPool
    dst: KVPool
    links: dict[str, NodeLinks]
    raw: socket.socket
    shm_ready: Ready

    def __post_init__(self) -> None:
        self.shm = ShmReceiver(self.dst)
        self.frames = FrameReceiver(self.dst)
        self.sealer = Seal()

    def ways(self) -> dict[str, Callable[[int], None]]:
        ways: dict[str, Callable[[int], None]] = {"memcpy": self.memcpy, "describe": self.describe, "seal": self.seal}
        ways["shm"] = self.pull_shm
        ways["raw tcp"] = self.pull_raw
        for way in WAYS:
            ways[f"zmq {way}"] = lambda n, way=way: self.pull_zmq(way, n)
        return ways

    def memcpy(self, n: int) -> None:
        for page in range(1, n + 1):
            np.copyto(self.dst.page_view(page), self.src.page_view(page))

    def describe(self, n: int) -> None:
        FrameSender(self.src).describe(range(1, n + 1))

    def seal(self, n: int) -> None:
        for page in range(1, n + 1):
            self.sealer.encrypt(self.src.page_view(page))

    def pull_shm(self, n: int) -> None:
        ready = self.shm_ready
        part = Ready(
            KEY, 1, 0, ready.pages[:n], ready.generations[:n], ready.digests[:n], ready.pool, False, 0, 0, b"", 0
        )
        self.shm.pull(part, (), range(1, n + 1))

    def ask(self, way: str, n: int) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{way} {n}\n".encode())
        self.child.stdin.flush()

    def pull_raw(self, n: int) -> None:
        self.ask("raw tcp", n)
        target = self.dst.pages_bytes[1 : n + 1].numpy().reshape(-1).data
        got = 0
        while got < len(target):
            got += self.raw.recv_into(target[got:])

    def pull_zmq(self, way: str, n: int) -> None:
        self.ask(f"zmq {way}", n)
        missing = n
        while missing:
            for inbound in self.links[way].poll(10.0):
                if isinstance(inbound, Received) and isinstance(inbound.message, Ready):
                    self.frames.pull(inbound.message, inbound.frames, inbound.message.pages)
                    missing -= len(inbound.message.pages)

    def close(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait(10)
        for links in self.links.values():
            links.close()
        self.raw.close()


def start(folder: Path, num_pages: int) -> Receiver:
    make_keys(folder / "secrets")
    links = {"tcp": NodeLinks("d", 1), "keys": NodeLinks("d", 2, options=with_keys(folder, "d"))}
    tcp = socket.create_server(("127.0.0.1", 0))
    (folder / "raw").write_text(str(tcp.getsockname()[1]))
    for way, link in links.items():
        (folder / way).write_text(link.endpoint)
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transfer", "--serve", str(folder), "--pages", str(num_pages)],
        stdin=subprocess.PIPE,
    )
    raw = tcp.accept()[0]
    tcp.close()
    readies = [wait_ready(link) for link in links.values()]
    return Receiver(child, make_pool(num_pages + 1, False), make_pool(num_pages + 1, False), links, raw, readies[0])


def wait_ready(links: NodeLinks) -> Ready:
    while True:
        for inbound in links.poll(1.0):
            if isinstance(inbound, Received) and isinstance(inbound.message, Ready):
                links.send(inbound.peer, Drain("p", ""))
                return inbound.message


def measure(receiver: Receiver, sizes_mib: list[int], rounds: int) -> dict[str, dict[str, float]]:
    """By size: GB/s of each way, and `way / baseline` for those that have one."""
    figures: dict[str, dict[str, float]] = {}
    for mib in sizes_mib:
        n = max(1, round(mib * MIB / PAGE_BYTES))
        seconds: dict[str, list[float]] = {way: [] for way in receiver.ways()}
        for i in range(rounds + 1):
            for way, run in receiver.ways().items():
                started = time.perf_counter()
                run(n)
                if i:  # the first round warms up
                    seconds[way].append(time.perf_counter() - started)
        row = {f"{way} GB/s": n * PAGE_BYTES / statistics.median(times) / 1e9 for way, times in seconds.items()}
        for way, base in BASELINE.items():
            ratios = (b / t for b, t in zip(seconds[base], seconds[way], strict=True))
            row[f"{way} / {base}"] = statistics.median(ratios)
            row[f"{way} / {base}, best rounds"] = min(seconds[base]) / min(seconds[way])
        figures[f"{mib} MiB"] = row
    return figures


def show(figures: dict[str, dict[str, float]]) -> None:
    needed = {f"{way} / {BASELINE[way]}": share for way, share in NEEDED.items()}
    for size, row in figures.items():
        print(size)
        for name, value in row.items():
            short = value < needed.get(name, 0.0) and int(size.split()[0]) >= 8
            print(f"    {name:34} {value:7.2f}{f'  SHORT of {needed[name]}' if short else ''}")


def main() -> int:
    parser = parser_with_json("Speed of the KV transports")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--mib", default="1,8,16,64")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pages", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every node does
    if args.serve:
        serve(args.serve, args.pages)
        return 0
    sizes = [int(size) for size in args.mib.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        receiver = start(Path(folder), max(1, round(max(sizes) * MIB / PAGE_BYTES)))
        try:
            figures = measure(receiver, sizes, args.rounds)
        finally:
            receiver.close()
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
