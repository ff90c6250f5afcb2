"""A TCP proxy between processes that reads along: it can delay, throttle, hold, cut and rewrite what passes, and strike
at the n-th message of a kind. Knows ZMTP's framing and our codec, nothing of what the messages do.

    dialler --> Link (own port) --> target       one Link per target; what a dialler calls itself is read from its READY

Frames:  flags (1: more, 2: long, 4: command)   length (1 or 8 bytes)   body        after 64 bytes of greeting each way

With `secrets` it ends CURVE on both sides: to a dialler it is the target, to the target it is whoever has dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.config.settings.endpoints import KEY_MARK
from shared.core.errors import WireError
from shared.wire.codec import decode, encode
from shared.wire.keys.key_files import KeyPair, new_pair, read_pair
from shared.wire.messages import AnyMessage, Message
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.wire.curve_ends import (
    CLIENT_GREETING,
    SERVER_GREETING,
    Sealed,
    Secrets,
    dial,
    serve,
)

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
READY, IDENTITY = b"\x05READY", b"\x06X-Peer"
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Seen:
    """One message on its way. `sender` and `receiver` are node ids; the target is what its link's name has before @."""

    link: str
    sender: str
    receiver: str
    message: AnyMessage


@dataclass(eq=False)
class Trap:
    """Strikes once, at the n-th message that matches. That one is the last which passes its connection, or (passes_on
    False) the first that does not: whoever dies has died exactly here, however far it had got on its own."""

    matches: Callable[[Seen], bool]
    strike: Callable[[Seen], None]
    nth: int = 1
    passes_on: bool = True
    ends_connection: bool = True
    after_s: float = 0.0  # between the message and the strike: the receiver gets to work
    fired: threading.Event = field(default_factory=threading.Event)
    count: int = 0

    def takes(self, seen: Seen) -> bool:
        if self.fired.is_set() or not self.matches(seen):
            return False
        self.count += 1
        return self.count == self.nth


@dataclass(eq=False)
class Link:
    """The way to one target, and its weather: the fields may be set from any thread, at any time."""

    name: str
    target: tuple[str, int]
    endpoint: str
    delay_s: float = 0.0  # each message waits so long, the next ones behind it
    bytes_per_s: float = float("inf")
    pair: KeyPair | None = None  # what diallers find there, with keys
    server: bytes = b""  # whom the target must prove to be, with keys
    held: bool = False  # half open: connected, and nothing arrives
    held_way: bool | None = None  # nothing arrives at the target (True), or from it (False); the other way all does
    refused: bool = False  # new connections are closed at once
    connections: set[asyncio.Task[None]] = field(default_factory=set)

    async def carry(self, size: int, *, to_target: bool) -> None:
        while self.held or self.held_way is to_target:
            await asyncio.sleep(POLL_S)
        wait_s = self.delay_s + size / self.bytes_per_s
        if wait_s:
            await asyncio.sleep(wait_s)


@dataclass(eq=False)
class Flow:
    """One direction of one connection. `names`: who sends to the target, and who from it. `coming`, `going`: the
    connections with keys that it comes from and goes to; None: in plain."""

    link: Link
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    to_target: bool
    names: dict[bool, str]
    coming: Sealed | None = None
    going: Sealed | None = None

    async def pass_on(self, data: bytes) -> None:
        await self.link.carry(len(data), to_target=self.to_target)
        self.writer.write(data)
        await self.writer.drain()

    async def write(self, flags: int, body: bytes) -> None:
        await self.pass_on(framed(flags, body))

    async def send(self, parts: list[bytes], flags: int = 0) -> None:
        """A message, or with these flags a command."""
        frames = [(flags | (MORE if i < len(parts) - 1 else 0), part) for i, part in enumerate(parts)]
        if self.going is not None:
            frames = [(0, self.going.sealed(*frame)) for frame in frames]
        await self.pass_on(b"".join(framed(*frame) for frame in frames))

    async def greeting(self) -> None:
        """Neither side says all of it before it has heard some of the other's."""
        left = GREETING_BYTES
        while left:
            data = await self.reader.read(left)
            if not data:
                raise EOFError
            left -= len(data)
            await self.pass_on(data)

    async def frame(self) -> tuple[int, bytes]:
        flags, body = await self._frame()
        return (flags, body) if self.coming is None else self.coming.opened(body)

    async def command(self) -> bytes:
        """The next frame of a handshake."""
        return (await self._frame())[1]

    async def greet(self, greeting: bytes, back: Flow) -> None:
        """Say this to where it comes from, and hear its own."""
        await back.pass_on(greeting)
        await self.reader.readexactly(GREETING_BYTES)

    async def _frame(self) -> tuple[int, bytes]:
        flags = (await self.reader.readexactly(1))[0]
        if flags & LONG:
            (size,) = struct.unpack(">Q", await self.reader.readexactly(8))
        else:
            size = (await self.reader.readexactly(1))[0]
        return flags, await self.reader.readexactly(size)


class FaultProxy:
    """Runs on a thread of its own until `close`. `rewrite` may replace a message; None leaves it as it is. `secrets`:
    where all that pass here have keys."""

    def __init__(
        self, rewrite: Callable[[Seen], Message | None] = lambda seen: None, secrets: Secrets | None = None
    ) -> None:
        self._rewrite = rewrite
        self._secrets = secrets
        self._stopping = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._servers: list[asyncio.Server] = []
        self.links: dict[str, Link] = {}
        self.traps: list[Trap] = []
        self.passed: Counter[str] = Counter()  # kinds of messages
        self.errors: list[BaseException] = []  # of the proxy itself
        self._thread.start()

    def link(self, name: str, target: str) -> Link:
        """A way to tcp://host:port that can be dialled at once. The same name again replaces the old one for those who
        ask by name; its connections stay. With keys the target of a node names its key, and so does the way; a way to
        a router is called ROUTER@something."""
        listener = socket.create_server(("127.0.0.1", 0))
        address, mark, key = target.partition(KEY_MARK)
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        link = Link(name, (host, int(port)), f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        if self._secrets is not None:
            link.pair = new_pair() if mark else read_pair(self._secrets.folder, name.partition("@")[0])
            link.server = bytes.fromhex(key) if mark else link.pair.public
            link.endpoint += f"{mark}{link.pair.public.hex()}" if mark else ""
        self.links[name] = link
        asyncio.run_coroutine_threadsafe(self._listen(link, listener), self._loop)
        return link

    def cut(self, name: str) -> None:
        """Every connection of this link ends now; dialling again is possible."""
        link = self.links[name]
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in link.connections])

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(HANG_GUARD_S)
        assert not self._thread.is_alive() and not self.errors, self.errors

    # ---- on the proxy's thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())  # then all tasks are cancelled

    async def _until_stopped(self) -> None:
        while not self._stopping.is_set():
            await asyncio.sleep(POLL_S)
        for server in self._servers:
            server.close()

    async def _listen(self, link: Link, listener: socket.socket) -> None:
        server = await asyncio.start_server(lambda r, w: self._accepted(link, r, w), sock=listener)
        self._servers.append(server)

    async def _accepted(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        link.connections.add(task)
        try:
            if not link.refused:
                await self._connect(link, reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # one side is gone, or the link was cut: so is the other
        except Exception as error:
            self.errors.append(error)
        finally:
            link.connections.discard(task)
            writer.transport.abort()

    async def _connect(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*link.target)
        names = {True: "", False: link.name.partition("@")[0]}
        there, back = Flow(link, reader, far_writer, True, names), Flow(link, far_reader, writer, False, names)
        pumps: list[asyncio.Future[None]] = []
        try:
            if link.pair is not None:
                await self._shake_hands(link.pair, there, back)
            pumps += [asyncio.ensure_future(self._pump(flow)) for flow in (there, back)]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            far_writer.transport.abort()
            for pump in pumps:
                pump.cancel()
            for ended in await asyncio.gather(*pumps, return_exceptions=True):
                if isinstance(ended, Exception) and not isinstance(ended, OSError | EOFError):
                    self.errors.append(ended)

    async def _shake_hands(self, pair: KeyPair, there: Flow, back: Flow) -> None:
        """With both ends, under keys of our own; what they say of themselves goes through."""
        assert self._secrets is not None
        await there.greet(SERVER_GREETING, back)
        guest = await serve(pair, there.command, back.write)
        await back.greet(CLIENT_GREETING, there)
        own = self._secrets.of(guest.public)
        far, said = await dial(own, there.link.server, guest.metadata, back.command, there.write)
        await guest.welcome(back.write, said)
        there.names[True] = dialler_of(READY + guest.metadata)
        there.coming = back.going = guest.connection
        there.going = back.coming = far

    async def _pump(self, flow: Flow) -> None:
        if flow.coming is None:
            await flow.greeting()
        parts: list[bytes] = []
        while True:
            flags, body = await flow.frame()
            if flags & COMMAND:
                flow.names[flow.to_target] = dialler_of(body) or flow.names[flow.to_target]
                await flow.send([body], COMMAND)
                continue
            parts.append(body)
            if not flags & MORE:
                if not await self._message(flow, parts):
                    return  # a trap: nothing passes here any more
                parts = []

    async def _message(self, flow: Flow, parts: list[bytes]) -> bool:
        """False when the connection ends with it."""
        try:
            message = decode(parts[0])
        except WireError:
            await flow.send(parts)
            return True
        seen = Seen(flow.link.name, flow.names[flow.to_target], flow.names[not flow.to_target], message)
        self.passed[type(message).__name__] += 1
        trap = next((trap for trap in self.traps if trap.takes(seen)), None)
        changed = self._rewrite(seen)
        if trap is None or trap.passes_on:
            await flow.send(parts if changed is None else [encode(changed), *parts[1:]])
        if trap is None:
            return True
        if trap.after_s:
            await asyncio.sleep(trap.after_s)
        trap.strike(seen)
        trap.fired.set()
        return not trap.ends_connection


def dialler_of(command: bytes) -> str:
    """The node id in a READY of a node; "" for other commands, and for the side that was dialled."""
    if not command.startswith(READY) or IDENTITY not in command:
        return ""
    at = command.index(IDENTITY) + len(IDENTITY)
    with contextlib.suppress(UnicodeDecodeError):
        (size,) = struct.unpack_from(">I", command, at)
        return command[at + 4 : at + 4 + size].decode().partition("@")[0]
    return ""


def framed(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return struct.pack(">BQ", flags | LONG, len(body)) + body
    return bytes((flags, len(body))) + body
