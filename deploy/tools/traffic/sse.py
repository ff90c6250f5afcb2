"""Split arriving bytes into server-sent events, and decode their OpenAI chunks. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"
MAX_EVENT_BYTES = 1 << 22


class Splitter:
    """Split a byte stream into the events' data.

    Lines end in LF or CR LF, and a blank line ends an event. CR alone is not supported.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._id = self._token = self._place = b""

    @property
    def last_event_id(self) -> str:
        """The id that resumes the stream; "" without event ids."""
        return f"{self._token.decode()}/{self._place.decode()}" if self._place else ""

    def restart(self) -> None:
        self._rest, self._data, self._id = b"", [], b""

    def feed_bytes(self, data: bytes) -> list[bytes]:
        """Return the data of completed events. Raise ValueError for an event without end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError("an event has no end")
        done: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"id:"):
                self._id = line[3:].strip()
            elif not line and self._data:
                done.append(b"\n".join(self._data))
                self._data = []
                if self._id:
                    self._seen(self._id)
        return done

    def _seen(self, event_id: bytes) -> None:
        """A connection's first id also names the stream, as TOKEN/PLACE."""
        token, slash, self._place = event_id.rpartition(b"/")
        self._token = token if slash else self._token
        self._id = b""


class ChunkFunction(msgspec.Struct, frozen=True):
    arguments: str | None = None


class ChunkCall(msgspec.Struct, frozen=True):
    index: int | None = None
    function: ChunkFunction = ChunkFunction()


class ChunkDelta(msgspec.Struct, frozen=True):
    """`reasoning`, `reasoning_content`: a thinking model's thoughts, which count like the answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChunkCall] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: ChunkDelta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""

    @property
    def calls(self) -> list[ChunkCall]:
        return (self.delta and self.delta.tool_calls) or []

    @property
    def has_text(self) -> bool:
        return bool(self.piece) or any(call.function.arguments for call in self.calls)


class ChunkPromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: ChunkPromptDetails | None = None


class Chunk(msgspec.Struct, frozen=True):
    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: Any = None


DECODER = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Raise ValueError for invalid data."""
    try:
        return DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"invalid chunk: {error}") from None


def error_text(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)
