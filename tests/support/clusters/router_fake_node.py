"""A node that speaks the wire protocol and computes nothing: what it answers is written in the prompt (HashLM text).

"...say:hello"   the tokens of `hello`, then the end token
"...fail:code"   ends with that error before its first token
"...late:code"   three tokens, then ends with that error
"...hold:"       never answers
anything else    the alphabet, over and over, until max_tokens
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shared.core.keys import RequestKey
from shared.wire.codec import key_of, to_wire
from shared.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Fingerprint,
    Generate,
    Heartbeat,
    Hello,
    Keep,
    Message,
    NodeLoad,
    SequenceEnd,
    TokenLogprob,
    TokenRun,
    Tokens,
    Welcome,
)
from shared.wire.peers import PeerUp, Received
from shared.wire.zeromq.link import NodeLinks
from tests.support.machine.patience import HANG_GUARD_S

EOS = 95
FINGERPRINT = Fingerprint(PROTOCOL_VERSION, 1, "hashlm", "w", "int", 16, "paged", "none", "build", "llguidance")
_epochs = itertools.count(1)


def char_ids(text: str) -> list[int]:
    return [ord(char) - 32 for char in text]


def prompt_text(generate: Generate) -> str:
    return "".join(chr(32 + i) for i in generate.prompt_ids)


def answer_ids(generate: Generate, seq_index: int) -> Iterator[int]:
    """Sequence i > 0 of n says its index first, so that choices differ."""
    text = prompt_text(generate)
    if seq_index:
        yield from char_ids(str(seq_index))
    if "say:" in text:
        yield from char_ids(text.rpartition("say:")[2].removesuffix(" assistant: "))
        while True:
            yield EOS
    yield from itertools.cycle(char_ids("abcdefghijklmnopqrstuvwxyz"))


@dataclass
class Running:
    key: RequestKey
    generate: Generate
    source: Iterator[int]
    position: int = 0
    fail_after: tuple[int, str] | None = None


@dataclass(eq=False)
class FakeNode:
    """Runs on its own thread from `start` to `stop`. `peer` is the decode node its hand-offs really go to."""

    role: str
    router: str
    node_id: str
    peer: FakeNode | None = None
    period_s: float = 0.001
    burst: int = 1
    cached_tokens: int = 0
    max_context: int = 4096
    fingerprint: Fingerprint = FINGERPRINT
    generates: list[Generate] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    keeps: queue.SimpleQueue[Keep] = field(default_factory=queue.SimpleQueue)
    raw: queue.SimpleQueue[Callable[[NodeLinks], None]] = field(default_factory=queue.SimpleQueue)
    epoch: int = 0
    frozen: threading.Event = field(default_factory=threading.Event)
    paused: threading.Event = field(default_factory=threading.Event)  # it lives and listens, and says no tokens
    welcomed: threading.Event = field(default_factory=threading.Event)
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.epoch = self.epoch or next(_epochs)
        self._running: dict[RequestKey, Running] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.node_id, daemon=True)

    def start(self) -> FakeNode:
        self._thread.start()
        assert self.welcomed.wait(HANG_GUARD_S)
        return self

    def stop(self) -> None:
        """Closes its connections at once, as a killed process does."""
        self._stopping.set()
        self._thread.join(HANG_GUARD_S)

    def install(self, generate: Generate) -> None:
        """The hand-off, in one call instead of pages and records."""
        self.raw.put(lambda _: self._admit(generate))

    def say_one(self) -> None:
        """One step while `paused`."""
        self.raw.put(self._step)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _run(self) -> None:
        links, connection = NodeLinks(self.node_id, self.epoch), 0
        links.dial("router", self.router)
        last_beat = 0.0
        try:
            while not self._stopping.is_set():
                if self.frozen.is_set():
                    time.sleep(0.005)
                    continue
                for inbound in links.poll(self.period_s):
                    if isinstance(inbound, PeerUp):
                        connection += 1
                        links.send("router", self._hello(links.endpoint, connection))
                    elif isinstance(inbound, Received):
                        self._handle(links, inbound.message)
                while not self.raw.empty():
                    self.raw.get()(links)
                if not self.paused.is_set():
                    self._step(links)
                if time.monotonic() - last_beat > 0.1:
                    last_beat = time.monotonic()
                    links.send("router", Heartbeat(self.node_id, self.epoch, self._load(), self.is_draining))
        finally:
            links.close()

    def _hello(self, endpoint: str, connection: int) -> Hello:
        return Hello(
            role=self.role, node_id=self.node_id, epoch=self.epoch, node_endpoint=endpoint,
            fingerprint=self.fingerprint, max_context=self.max_context, max_running=8, host_id="h", transports=["zmq"],
            connection=connection, adapters=[],
        )  # fmt: skip

    def _load(self) -> NodeLoad:
        rows = {"free": 8 - len(self._running), "running": len(self._running)}
        pages = {"free": 60, "cached": 20, "active": 20, "granted": 0, "held": 0}
        return NodeLoad(100, pages, 8, rows, 0, 0, 1, {"steps": 7.0}, {"step_seconds": [0.002]}, {}, "")

    def _handle(self, links: NodeLinks, message: Message) -> None:
        if isinstance(message, Welcome):
            if message.connection:  # 0 answers a heartbeat that came before the Hello
                self.welcomed.set()
        elif isinstance(message, Abort):
            self.aborts.append(message)
            target = key_of(message.key)
            doomed = [k for k in self._running if k == target or (message.all_sequences and k.sibling(0) == target)]
            for key in doomed:
                del self._running[key]
        elif isinstance(message, Keep):
            self.keeps.put(message)
        elif isinstance(message, Generate):
            self.generates.append(message)
            if message.decode_node and self.peer is not None and "hold:" not in prompt_text(message):
                self._prefill(links, message)
            else:
                self._admit(message)

    def _prefill(self, links: NodeLinks, generate: Generate) -> None:
        """The first token goes to the router, everything else to the decode node."""
        assert self.peer is not None and generate.decode_node == self.peer.node_id
        if "fail:" in prompt_text(generate):
            self._admit(generate)
            return
        key = key_of(generate.key)
        runs = [self._token_run(generate, key.sibling(i), 0, [next(answer_ids(generate, i))])
                for i in range(generate.num_sequences)]  # fmt: skip
        self._send(links, runs, [])
        self.peer.install(generate)

    def _admit(self, generate: Generate) -> None:
        if any(abort.key == generate.key for abort in self.aborts):
            return  # the Abort came first
        text = prompt_text(generate)
        fail_after = None
        for word, count in (("fail:", 0), ("late:", 3)):
            if word in text:
                fail_after = (count, text.rpartition(word)[2].split(" ")[0])
        for index in range(generate.num_sequences):
            key = key_of(generate.key).sibling(index)
            source, done = answer_ids(generate, index), len(generate.output_ids[index])
            for _ in range(done):
                next(source)
            if "hold:" not in text:
                self._running[key] = Running(key, generate, source, done, fail_after)

    def _step(self, links: NodeLinks) -> None:
        """One run of up to `burst` tokens for every sequence, as a step with accepted drafts brings."""
        runs: list[TokenRun] = []
        ends: list[SequenceEnd] = []
        for running in list(self._running.values()):
            first, end = running.position, None
            ids: list[int] = []
            while end is None and len(ids) < self.burst:
                end = self._advance(running, ids)
            if ids:
                runs.append(self._token_run(running.generate, running.key, first, ids))
            if end is not None:
                ends.append(end)
                del self._running[running.key]
        if runs or ends:
            self._send(links, runs, ends)

    def _advance(self, running: Running, ids: list[int]) -> SequenceEnd | None:
        """One token of one sequence; its end when that was the last."""
        sampling = running.generate.sampling
        if running.fail_after is not None and running.position >= running.fail_after[0]:
            return self._end(running, "error", running.fail_after[1])
        token = next(running.source)
        ids.append(token)
        running.position += 1
        if token in sampling.stop_token_ids and running.position > sampling.min_tokens:
            return self._end(running, "stop", "")
        return self._end(running, "length", "") if running.position >= sampling.max_tokens else None

    def _end(self, running: Running, reason: str, code: str) -> SequenceEnd:
        message = f"made up: {code}" if code else ""
        return SequenceEnd(to_wire(running.key), reason, running.position, self.cached_tokens, code, message)

    def _token_run(self, generate: Generate, key: RequestKey, position: int, ids: list[int]) -> TokenRun:
        wanted = generate.sampling.num_logprobs
        logprobs = [] if wanted < 0 else [self._logprobs(token, wanted) for token in ids]
        return TokenRun(to_wire(key), position, ids, logprobs)

    def _logprobs(self, token: int, wanted: int) -> TokenLogprob:
        tops = tuple((token + i) % 95 for i in range(wanted))
        return TokenLogprob(-0.5, tops, tuple(-0.5 - i for i in range(wanted)))

    def _send(self, links: NodeLinks, runs: list[TokenRun], ends: list[SequenceEnd]) -> None:
        links.send("router", Tokens(self.node_id, self.epoch, runs, ends))
