"""Decode compressed bodies piece by piece, so that the caller can stop at a limit. Knows no threads."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial

from router.http.errors import ACCEPTED_CODINGS, CodingRefused
from shared.core.errors import InvalidRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE_BYTES = 256 << 10
MOST_PARTS = 16  # gzip members or zstd frames in one body; after each one the rest of the input is copied
MOST_CODINGS = 2
WINDOW_LOG = 23  # RFC 9659: a zstd window of at most 8 MiB
ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: WINDOW_LOG}
GZIP, ZLIB, RAW = 31, 15, -15  # zlib's names of its formats


Parts = Generator[bytes, None, bytes]  # yields pieces, returns the input that is left


def _inflated(wbits: int, data: bytes) -> Parts:
    one, rest = zlib.decompressobj(wbits), data
    while not one.eof:
        piece = one.decompress(rest, PIECE_BYTES)
        rest = one.unconsumed_tail
        if not piece and not rest and not one.eof:
            raise EOFError
        yield piece
    return one.unused_data


def _inflated_any(data: bytes) -> Parts:
    """The coding `deflate` is zlib's format, but some clients leave out zlib's header."""
    has_header = len(data) >= 2 and data[0] & 15 == 8 and int.from_bytes(data[:2], "big") % 31 == 0
    return _inflated(ZLIB if has_header else RAW, data)


def _unzstd(data: bytes) -> Parts:
    one, rest = zstd.ZstdDecompressor(options=ZSTD_OPTIONS), data
    while not one.eof:
        piece, rest = one.decompress(rest, PIECE_BYTES), b""
        if not piece and one.needs_input and not one.eof:
            raise EOFError
        yield piece
    return one.unused_data


_gunzipped = partial(_inflated, GZIP)
DECODERS: dict[str, Callable[[bytes], Parts]] = {
    "gzip": _gunzipped,
    "x-gzip": _gunzipped,
    "deflate": _inflated_any,
    "zstd": _unzstd,
}


def codings_of(headers: Iterable[bytes]) -> list[str]:
    """Return the codings in the order in which the client applied them. Raise CodingRefused."""
    names = [name.strip().lower() for value in headers for name in value.decode("latin-1").split(",")]
    codings = [name for name in names if name not in ("", "identity")]
    for name in codings:
        if name not in DECODERS:
            raise CodingRefused(
                f"the content coding {name[:40]!r} is not served; take one of: {ACCEPTED_CODINGS.decode()}"
            )
    if len(codings) > MOST_CODINGS:
        raise CodingRefused(f"a body may have at most {MOST_CODINGS} content codings")
    return codings


def decode(coding: str, data: bytes) -> Iterator[bytes]:
    """Yield the contents in pieces of at most PIECE_BYTES. Raise InvalidRequest."""
    try:
        for _ in range(MOST_PARTS):
            data = yield from DECODERS[coding](data)
            if not data:
                return
    except (zlib.error, zstd.ZstdError, EOFError):
        raise InvalidRequest(f"the request body is not valid {coding}, or it is cut off") from None
    raise InvalidRequest(f"the request body has more than {MOST_PARTS} compressed parts")
