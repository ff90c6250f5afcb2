"""Read a file of requests line by line, and separate bad lines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.core.errors import ConfigError

URLS = ("/v1/chat/completions", "/v1/completions")
ID_HEAD = "batch_req_"
MAX_LINE_BYTES = 64 << 20
DIGEST_BYTES = 16
MAX_SHOWN_DUPLICATES = 5
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """`body`: the line's JSON text, unchanged. `id`: a digest of everything that affects the answer."""

    number: int
    custom_id: str
    url: str
    body: bytes
    id: str


@dataclass(frozen=True, slots=True)
class BadLine:
    number: int
    custom_id: str | None
    message: str

    @property
    def id(self) -> str:
        return f"{ID_HEAD}line_{self.number}"


class InputLine(msgspec.Struct, frozen=True):
    """A JSON object with any fields. `what_is_wrong` checks the fields."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"")


class StreamField(msgspec.Struct, frozen=True):
    stream: Any = None


@dataclass(frozen=True, slots=True)
class Survey:
    num_lines: int
    num_answered: int


def read_lines(path: Path) -> Iterator[BatchRequest | BadLine]:
    """Yield lines in bounded memory. Skip empty lines."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                yield BadLine(number, None, f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB")
                continue
            text = raw.removeprefix(BYTE_ORDER_MARK).strip() if number == 1 else raw.strip()
            if text:
                yield parse_line(number, text)


def parse_line(number: int, text: bytes) -> BatchRequest | BadLine:
    try:
        line = msgspec.json.decode(text, type=InputLine)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return BadLine(number, None, f"line {number} is not a JSON object: {error}")
    if not isinstance(line.custom_id, str) or not line.custom_id:
        return BadLine(number, None, f"line {number} has no custom_id, which must be a string")
    wrong = what_is_wrong(line)
    if wrong:
        return BadLine(number, line.custom_id, f"line {number}: {wrong}")
    body = bytes(line.body)
    return BatchRequest(number, line.custom_id, line.url, body, id_of(line.custom_id, line.url, body))


def what_is_wrong(line: InputLine) -> str:
    if line.method != "POST":
        return f"method is {shown(line.method)}; it must be 'POST'"
    if line.url not in URLS:
        return f"url is {shown(line.url)}; it must be {' or '.join(URLS)}"
    if not bytes(line.body):
        return "body is missing"
    try:
        streams = msgspec.json.decode(line.body, type=StreamField).stream
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return f"body is not a JSON object: {error}"
    return "body asks for a stream, but answers are written whole: leave out `stream`" if streams else ""


def shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:100]


def id_of(custom_id: str, url: str, body: bytes) -> str:
    digest = hashlib.blake2b(msgspec.json.encode([custom_id, url]), digest_size=DIGEST_BYTES)
    digest.update(body)
    return ID_HEAD + digest.hexdigest()


def name_digest(custom_id: str) -> bytes:
    """Return a digest, which is small because the digests of all names are kept in memory."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def is_answered(line: BatchRequest | BadLine, answered: Mapping[bytes, str]) -> bool:
    """`answered`: the result of `answered_in`."""
    return isinstance(line, BatchRequest) and answered.get(name_digest(line.custom_id)) == line.id


def survey(path: Path, answered: Mapping[bytes, str]) -> Survey:
    """Read the whole file before the first request. Raise ConfigError for a repeated custom_id."""
    first_at: dict[bytes, int] = {}
    twice: list[str] = []
    num_lines = num_answered = 0
    for line in read_lines(path):
        num_lines += 1
        num_answered += is_answered(line, answered)
        if line.custom_id is None:
            continue
        first = first_at.setdefault(name_digest(line.custom_id), line.number)
        if first != line.number:
            twice.append(f"{shown(line.custom_id)} in lines {first} and {line.number}")
    if twice:
        more = f", and {len(twice) - MAX_SHOWN_DUPLICATES} more" if len(twice) > MAX_SHOWN_DUPLICATES else ""
        listed = "; ".join(twice[:MAX_SHOWN_DUPLICATES])
        raise ConfigError(f"{path}: a custom_id must be unique, but there is {listed}{more}")
    return Survey(num_lines, num_answered)
