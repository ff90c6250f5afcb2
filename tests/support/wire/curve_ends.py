"""CURVE (ZeroMQ's RFC 26) at both ends of a connection, for a proxy that reads along and has everybody's secrets. By
libsodium, which pyzmq brings. Knows nothing of sockets: frames are read and written by its callers.

    dialler --HELLO, INITIATE--> serve()   dial() --HELLO, INITIATE--> target        READY goes back the same way
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import zmq

from shared.wire.keys.key_files import KeyPair, names_with_secret, new_pair, read_pair
from tests.support.wire.raw_zmtp import COMMAND, CURVE_GREETING, MORE

Read = Callable[[], Awaitable[bytes]]  # the body of the next frame
Write = Callable[[int, bytes], Awaitable[None]]  # a frame: flags and body
CLIENT_GREETING = CURVE_GREETING
SERVER_GREETING = CURVE_GREETING[:32] + b"\x01" + CURVE_GREETING[33:]
HELLO, WELCOME, INITIATE = b"\x05HELLO", b"\x07WELCOME", b"\x08INITIATE"
READY, MESSAGE = b"\x05READY", b"\x07MESSAGE"
COOKIE_BYTES = 96
INNER_MORE, INNER_COMMAND = 1, 2
MAC_BYTES = 16


class CurveError(OSError):
    """The other end is not who it should be: its connection ends."""


@cache
def sodium() -> ctypes.CDLL:
    own = sorted((Path(zmq.__file__).parents[1] / "pyzmq.libs").glob("libsodium*"))
    found = str(own[0]) if own else ctypes.util.find_library("sodium")
    assert found, "pyzmq brings no libsodium here, and the system has none"
    return ctypes.CDLL(found)


def shared_key(public: bytes, secret: bytes) -> bytes:
    key = ctypes.create_string_buffer(32)
    if sodium().crypto_box_beforenm(key, public, secret):
        raise CurveError("a public key that is none")
    return key.raw


def seal(nonce: bytes, key: bytes, text: bytes) -> bytes:
    sealed = ctypes.create_string_buffer(len(text) + MAC_BYTES)
    sodium().crypto_box_easy_afternm(sealed, text, ctypes.c_ulonglong(len(text)), nonce, key)
    return sealed.raw


def unseal(nonce: bytes, key: bytes, sealed: bytes) -> bytes:
    text = ctypes.create_string_buffer(max(1, len(sealed) - MAC_BYTES))
    if len(sealed) < MAC_BYTES or sodium().crypto_box_open_easy_afternm(
        text, sealed, ctypes.c_ulonglong(len(sealed)), nonce, key
    ):
        raise CurveError("a box that was sealed for another key")
    return text.raw[: len(sealed) - MAC_BYTES]


def short(number: int) -> bytes:
    return number.to_bytes(8, "big")


@dataclass
class Sealed:
    """An open connection, as one of its ends sees it."""

    key: bytes
    own: bytes  # begin of the nonces of what this end says
    other: bytes
    count: int = 2  # the handshake has had two

    def sealed(self, flags: int, body: bytes) -> bytes:
        """Return the frame's body that stands for a frame."""
        self.count += 1
        inner = (INNER_MORE if flags & MORE else 0) | (INNER_COMMAND if flags & COMMAND else 0)
        nonce = short(self.count)
        return MESSAGE + nonce + seal(self.own + nonce, self.key, bytes((inner,)) + body)

    def opened(self, body: bytes) -> tuple[int, bytes]:
        """Return the flags and the body that were sealed."""
        if not body.startswith(MESSAGE):
            raise CurveError("no message")
        text = unseal(self.other + body[8:16], self.key, body[16:])
        return (MORE if text[0] & INNER_MORE else 0) | (COMMAND if text[0] & INNER_COMMAND else 0), text[1:]


@dataclass
class Guest:
    """Who has dialled: its public key, what it says of itself, and the connection, which waits for its READY."""

    public: bytes
    metadata: bytes
    connection: Sealed

    async def welcome(self, write: Write, metadata: bytes) -> None:
        nonce = short(1)
        text = seal(b"CurveZMQREADY---" + nonce, self.connection.key, metadata)
        await write(COMMAND, READY + nonce + text)


async def serve(own: KeyPair, read: Read, write: Write) -> Guest:
    """Do the server's side of the handshake with this pair, after the greetings."""
    hello = expect(await read(), HELLO)
    client = hello[74:106]
    unseal(b"CurveZMQHELLO---" + hello[106:114], shared_key(client, own.secret), hello[114:])
    brief, cookie, nonce = new_pair(), os.urandom(COOKIE_BYTES), os.urandom(16)
    text = seal(b"WELCOME-" + nonce, shared_key(client, own.secret), brief.public + cookie)
    await write(COMMAND, WELCOME + nonce + text)
    initiate = expect(await read(), INITIATE)
    if initiate[:COOKIE_BYTES] != cookie:
        raise CurveError("another cookie")
    key, nonce = shared_key(client, brief.secret), initiate[COOKIE_BYTES : COOKIE_BYTES + 8]
    inner = unseal(b"CurveZMQINITIATE" + nonce, key, initiate[COOKIE_BYTES + 8 :])
    public, vouch = inner[:32], unseal(b"VOUCH---" + inner[32:48], shared_key(inner[:32], brief.secret), inner[48:128])
    if vouch != client + own.public:
        raise CurveError("a vouch for somebody else")
    return Guest(public, inner[128:], Sealed(key, b"CurveZMQMESSAGES", b"CurveZMQMESSAGEC"))


async def dial(own: KeyPair, server: bytes, metadata: bytes, read: Read, write: Write) -> tuple[Sealed, bytes]:
    """Behind the greetings: as the client that has this pair. Return the connection, and what the server says of
    itself."""
    brief, nonce = new_pair(), short(1)
    signature = seal(b"CurveZMQHELLO---" + nonce, shared_key(server, brief.secret), bytes(64))
    await write(COMMAND, HELLO + b"\x01\x00" + bytes(72) + brief.public + nonce + signature)
    welcome = expect(await read(), WELCOME)
    inner = unseal(b"WELCOME-" + welcome[:16], shared_key(server, brief.secret), welcome[16:])
    server_brief, cookie = inner[:32], inner[32:]
    key, nonce, long_nonce = shared_key(server_brief, brief.secret), short(2), os.urandom(16)
    vouch = seal(b"VOUCH---" + long_nonce, shared_key(server_brief, own.secret), brief.public + server)
    text = seal(b"CurveZMQINITIATE" + nonce, key, own.public + long_nonce + vouch + metadata)
    await write(COMMAND, INITIATE + cookie + nonce + text)
    ready = expect(await read(), READY)
    said = unseal(b"CurveZMQREADY---" + ready[:8], key, ready[8:])
    return Sealed(key, b"CurveZMQMESSAGEC", b"CurveZMQMESSAGES"), said


def expect(body: bytes, name: bytes) -> bytes:
    """Return what stands behind a command's name."""
    if not body.startswith(name):
        raise CurveError(f"{body[:20]!r} and not {name!r}")
    return body[len(name) :]


class Secrets:
    """All pairs of a test's folder, as they are now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pairs(self) -> Iterable[KeyPair]:
        return (read_pair(self.folder, name) for name in names_with_secret(self.folder))

    def of(self, public: bytes) -> KeyPair:
        found = next((pair for pair in self.pairs() if pair.public == public), None)
        if found is None:
            raise CurveError("nobody of this test")
        return found
