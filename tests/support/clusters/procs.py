"""Real node processes, and a router made of a bare socket that speaks the wire protocol to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import zmq

from shared.core import launcher
from shared.wire.codec import to_wire
from shared.wire.messages import Abort, Drain, Generate, Hello, Key, Message, Tokens, Welcome
from shared.wire.peers import PeerClosed, Received
from shared.wire.zeromq.link import open_router
from shared.wire.zeromq.link_options import LinkOptions
from tests.support.cores.core_rig import Job
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.node_pair import FakeRouter, ticket_for, welcome_for

ROOT = Path(__file__).resolve().parents[3]
ROUTER_ID, ROUTER_EPOCH = "test", 1


class RouterStub:
    """Welcomes nodes and keeps what they report."""

    def __init__(self, epoch: int = ROUTER_EPOCH, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self.epoch = epoch
        self.context, _, self.socket = open_router(endpoint, LinkOptions())
        self.endpoint = self.socket.endpoint
        self.book = FakeRouter()
        self.hellos: dict[str, Hello] = {}  # node id -> newest
        self.peers: dict[str, str] = {}  # node id -> link name
        self.closed: list[str] = []
        self.arrived: dict[tuple[str, Key], float] = {}
        self._poller = zmq.Poller()
        self._poller.register(self.socket.socket, zmq.POLLIN)
        self._poller.register(self.socket.monitor, zmq.POLLIN)

    def pump(self, timeout_s: float = 0.02) -> None:
        self._poller.poll(timeout_s * 1000)
        for inbound in self.socket.receive():
            if isinstance(inbound, PeerClosed):
                self.closed.append(inbound.peer)
            elif isinstance(inbound, Received) and isinstance(inbound.message, Hello):
                self.hellos[inbound.message.node_id] = inbound.message
                self.peers[inbound.message.node_id] = inbound.peer
                welcome = Welcome(ROUTER_ID, self.epoch, inbound.message.connection)
                self.socket.send(inbound.peer, welcome_for(inbound.peer, welcome, time.monotonic()))
            elif isinstance(inbound, Received):
                self.book.take(inbound.peer, self._of_this_life(inbound.message))

    def _of_this_life(self, message: Message) -> Message:
        """A router knows no requests of its former life: tokens that were under way are nobody's."""
        if not isinstance(message, Tokens):
            return message
        runs = [run for run in message.runs if run.key.router_epoch == self.epoch]
        ends = [end for end in message.ends if end.key.router_epoch == self.epoch]
        return msgspec.structs.replace(message, runs=runs, ends=ends)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain: {what}"
            self.pump()

    def send(self, node_id: str, message: Message) -> None:
        assert self.socket.send(self.peers[node_id], message)

    def generate(self, node_id: str, job: Job, decode: str = "", *, n: int = 1, remaining_ms: int = 600_000) -> Key:
        key = Key(ROUTER_ID, self.epoch, f"r{job.rid}", 0, 0)
        hello = self.hellos[decode] if decode else None
        self.send(
            node_id,
            Generate(
                key=key,
                prompt_ids=list(job.prompt),
                output_ids=[[] for _ in range(n)],
                num_sequences=n,
                sampling=to_wire(job.sampling),
                seed=job.seed,
                decode_node=decode,
                decode_epoch=hello.epoch if hello else 0,
                decode_endpoint=hello.node_endpoint if hello else "",
                remaining_ms=remaining_ms,
                ended=[],
                adapter=job.adapter,
                scored=1,
                cache_salt=job.cache_salt,
                ticket=ticket_for(key, self.peers[node_id], self.peers[decode], job, n) if decode else None,
            ),
        )
        return key

    def abort(self, node_id: str, key: Key) -> None:
        self.send(node_id, Abort(key, all_sequences=True))

    def drain(self, node_id: str) -> None:
        self.send(node_id, Drain(node_id, ""))

    def wait_ends(self, keys: Sequence[Key]) -> None:
        self.until(lambda: all(self.book.ends[key] for key in keys), "ends of requests")

    def wait_at_rest(self, node_id: str) -> None:
        """Two heartbeats without rows in use, the second after the first was seen."""

        def at_rest() -> bool:
            beat = self.book.heartbeats.get(node_id)
            return beat is not None and beat.load.rows["free"] == beat.load.rows_total and beat.load.waiting == 0

        self.book.heartbeats.pop(node_id, None)
        self.until(at_rest, f"{node_id} at rest")
        pages = self.book.heartbeats[node_id].load.pages
        assert pages["free"] + pages["cached"] == self.book.heartbeats[node_id].load.pages_total, pages

    def close(self) -> None:
        self.socket.close()
        self.context.term()


class NodeProcess:
    """`baton prefill` or `baton decode` on HashLM. `baton`: the command."""

    def __init__(
        self,
        role: str,
        node_id: str,
        router: RouterStub,
        log_dir: Path,
        *flags: str,
        baton: Sequence[str] = launcher.command("deploy.cli"),
    ) -> None:
        self.node_id = node_id
        self.log_path = log_dir / f"{node_id}.log"
        argv = [*baton, role, "--model", "hashlm", "--router", router.endpoint]
        argv += ["--node-id", node_id, "--heartbeat-s", "0.1", "--threads", "1", *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(HANG_GUARD_S)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_GUARD_S)

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(HANG_GUARD_S)


@contextlib.contextmanager
def few_descriptors(pid: int, spare: int) -> Iterator[None]:
    """Limit the process to `spare` more open descriptors."""
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + spare, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)
