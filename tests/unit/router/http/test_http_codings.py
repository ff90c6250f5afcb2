"""Compressed bodies: what each coding reads, what is refused, and what a body that grows may take."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import random
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Scope

from router.http import decoding
from router.http.body_budget import BodyBudget, BodyHold
from router.http.codings import MOST_CODINGS, MOST_PARTS, PIECE_BYTES, codings_of, decode, zstd
from router.http.connection import Connection
from router.http.decoding import BodyDecoding
from router.http.errors import ACCEPTED_CODINGS, BodiesFull, CodingRefused, error_headers
from router.http.request_body import BOM
from shared.core.errors import BodyTooLarge, InvalidRequest

Encode = Callable[[bytes], bytes]
LIMIT = 4 * PIECE_BYTES


def deflate(data: bytes) -> bytes:
    one = zlib.compressobj(wbits=-15)
    return one.compress(data) + one.flush()


ENCODERS: list[tuple[str, Encode]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", deflate),
    ("zstd", zstd.compress),
]
EACH = pytest.mark.parametrize(
    ("coding", "encode"), ENCODERS, ids=[f"{name}{i}" for i, (name, _) in enumerate(ENCODERS)]
)


@EACH
@given(data=st.binary(max_size=300))
def test_other_bytes_are_refused_or_read(coding: str, encode: Encode, data: bytes) -> None:
    for sent in (data, encode(b"a body")[:4] + data):
        try:
            list(decode(coding, sent))
        except InvalidRequest as error:
            assert error.status == 400


@EACH
def test_a_body_that_is_cut_off_is_refused(coding: str, encode: Encode) -> None:
    whole = encode(bytes(range(256)) * 9)
    for end in range(len(whole)):
        with pytest.raises(InvalidRequest, match="cut off"):
            list(decode(coding, whole[:end]))


@EACH
def test_a_bomb_is_read_piece_by_piece(coding: str, encode: Encode) -> None:
    pieces = decode(coding, encode(bytes(16 << 20)))
    assert all(len(piece) <= PIECE_BYTES for piece in itertools.islice(pieces, 20))


@pytest.mark.parametrize(("coding", "encode"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
def test_a_body_has_few_parts(coding: str, encode: Encode) -> None:
    """Many tiny parts would be copied again and again."""
    assert b"".join(decode(coding, encode(b"ab") * MOST_PARTS)) == b"ab" * MOST_PARTS
    with pytest.raises(InvalidRequest, match="parts"):
        list(decode(coding, encode(b"ab") * (MOST_PARTS + 1)))


def test_a_zstd_frame_with_a_huge_window_is_refused() -> None:
    """Its decoder would need the window's memory."""

    def frame(window_log: int) -> bytes:
        names = zstd.CompressionParameter
        maker = zstd.ZstdCompressor(options={names.window_log: window_log, names.content_size_flag: 0})
        return maker.compress(b"a" * 1000, zstd.ZstdCompressor.FLUSH_BLOCK) + maker.flush()

    assert b"".join(decode("zstd", frame(23))) == b"a" * 1000
    with pytest.raises(InvalidRequest):
        list(decode("zstd", frame(24)))


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([], []),
        ([b""], []),
        ([b"identity"], []),
        ([b" GZip ,, "], ["gzip"]),
        ([b"gzip, zstd"], ["gzip", "zstd"]),
        ([b"deflate", b"x-gzip"], ["deflate", "x-gzip"]),
    ],
)
def test_codings_are_a_list(sent: list[bytes], expected: list[str]) -> None:
    assert codings_of(sent) == expected


@pytest.mark.parametrize(
    "sent", [b"br", b"compress", b"gzip;q=1", b"\xff", b"gzip," * (MOST_CODINGS + 1), b"aws-chunked"]
)
def test_other_codings_are_refused_by_name(sent: bytes) -> None:
    with pytest.raises(CodingRefused) as error:
        codings_of([sent])
    assert error.value.status == 415
    assert (b"accept-encoding", ACCEPTED_CODINGS) in error_headers(error.value, 1)


# ---- an exchange's body


def exchange(parts: list[bytes], headers: Iterable[tuple[bytes, bytes]], budget: BodyBudget) -> Connection:
    messages = iter(parts)

    async def receive() -> Message:
        part = next(messages)
        return {"type": "http.request", "body": part, "more_body": messages.__length_hint__() > 0}  # type: ignore[attr-defined]

    async def send(message: Message) -> None:
        raise AssertionError

    scope: Scope = {"type": "http", "headers": list(headers), "client": ("here", 1)}
    return Connection(scope, receive, send, 1.0, budget, BodyDecoding())


def read(parts: list[bytes], *codings: bytes, budget: BodyBudget | None = None, limit: int = LIMIT) -> bytes:
    """The body; afterwards the budget must be empty."""
    bodies = budget or BodyBudget(100 * LIMIT)

    async def main() -> bytes:
        connection = exchange(parts, [(b"content-encoding", coding) for coding in codings], bodies)
        try:
            body = await connection.body.read(limit)
            assert len(body) <= bodies.used <= len(body) + len(BOM)
            return body
        finally:
            connection.body.hold.let_go()
            assert not bodies.used

    return asyncio.run(main())


@EACH
@pytest.mark.parametrize("size", [0, 10, PIECE_BYTES, LIMIT])
def test_an_exchange_reads_the_decoded_body(coding: str, encode: Encode, size: int) -> None:
    body = (random.Random(0).randbytes(5000) * 300)[:size]
    sent = encode(body)
    assert read([sent[:5], sent[5:]], coding.encode()) == body


def test_two_codings_are_undone_in_reverse() -> None:
    assert read([zstd.compress(gzip.compress(b"{}"))], b"gzip, zstd") == b"{}"


@EACH
def test_a_body_too_large_after_decoding_is_refused_early(coding: str, encode: Encode) -> None:
    budget = BodyBudget(LIMIT + 2 * PIECE_BYTES)  # a decoder that goes on would not fit
    with pytest.raises(BodyTooLarge):
        read([encode(bytes(30 * LIMIT))], coding.encode(), budget=budget)


def test_a_bomb_in_a_bomb_is_refused() -> None:
    with pytest.raises(BodyTooLarge):
        read([gzip.compress(gzip.compress(bytes(30 * LIMIT)))], b"gzip, gzip")


def test_decoded_bytes_are_in_the_budget() -> None:
    with pytest.raises(BodiesFull):
        read([gzip.compress(bytes(LIMIT))], b"gzip", budget=BodyBudget(LIMIT // 2))


@pytest.mark.parametrize("encode", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_byte_order_mark_is_no_part_of_the_json(encode: Encode) -> None:
    assert read([encode(BOM + b"{}")], *([b"gzip"] if encode is gzip.compress else [])) == b"{}"


def test_few_bodies_are_decoded_at_once_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decoder has a window of megabytes, which the budget does not count."""
    open_now, most, threads = 0, 0, set[str]()

    def watched(coding: str, data: bytes) -> Any:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        threads.add(threading.current_thread().name)
        yield from decode(coding, data)
        open_now -= 1

    async def main() -> None:
        one = BodyDecoding()
        data = gzip.compress(bytes(LIMIT))
        hold = BodyHold(None, "")
        await asyncio.gather(*(one.decoded(data, ["gzip"], LIMIT, hold) for _ in range(10)))

    monkeypatch.setattr(decoding, "decode", watched)
    asyncio.run(main())
    assert most <= decoding.NUM_THREADS and all(name.startswith("decode") for name in threads)


def test_an_answer_that_is_kept_waits_for_no_body() -> None:
    """The defect: it read the body of an exchange that had read it already, and waited until the client hung up."""

    async def main() -> None:
        unsent = exchange([], [(b"content-length", b"2")], BodyBudget(1)).unsent()
        await unsent.answer(200, b"kept")
        assert unsent.data == b"kept"

    asyncio.run(main())
