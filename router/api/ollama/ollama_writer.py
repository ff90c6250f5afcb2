"""Write answers of /api/chat and /api/generate: lines of JSON, or one object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol

from router.api.answer.blocks import Block, BlockEnded, BlockEvent, BlockGrew, BlockKind, Blocks, whole_blocks
from router.api.answer.choice_text import Delta
from router.api.answer.shapes import TokenNames
from router.api.answer.writer import ENCODER, NOT_CACHED, AnswerFacts
from router.api.anthropic.messages_writer import is_usable
from router.http.errors import ollama_error_json
from shared.core.errors import BatonError
from shared.core.states import FinishReason

Json = dict[str, object]
NDJSON_HEADERS = ((b"content-type", b"application/x-ndjson"), *NOT_CACHED)
NANOSECONDS = 1_000_000_000


class Loading(StrEnum):
    """The reason why a request without a prompt has ended."""

    LOAD = "load"
    UNLOAD = "unload"


class PartWriter(Protocol):
    """Makes the member of a line that holds a part of the answer."""

    def __call__(self, text: str = "", thought: str = "", calls: Sequence[Json] = ()) -> Json: ...


def chat_part(text: str = "", thought: str = "", calls: Sequence[Json] = ()) -> Json:
    message: Json = {"role": "assistant", "content": text}
    if thought:
        message["thinking"] = thought
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def generate_part(text: str = "", thought: str = "", calls: Sequence[Json] = ()) -> Json:
    """There are no calls: the path has no tools."""
    return {"response": text, "thinking": thought} if thought else {"response": text}


class OllamaWriter:
    """See `router.api.answer.writer.Writer`. Answers have one choice. `name`: the model as the client calls it.

    `loading`: set for a request that has no prompt."""

    headers: Sequence[tuple[bytes, bytes]] = NDJSON_HEADERS
    num_events = 0  # not numbered

    def __init__(
        self, facts: AnswerFacts, part: PartWriter, name: str | None, *, loading: Loading | None = None
    ) -> None:
        self.answer_id = f"ollama-{facts.token}"
        self._facts = facts
        self._part = part
        self._loading = loading
        self._blocks = Blocks()
        self._names = TokenNames(facts.tokenizer, facts.plan.show)
        created = datetime.fromtimestamp(facts.created, UTC)
        self._head: Json = {"model": name or facts.plan.model, "created_at": time_text(created)}
        self.ping = self._line(part())  # clients parse every line, so a ping is an empty part

    def opening(self) -> bytes:
        return b""

    def more(self, deltas: Mapping[int, Delta]) -> bytes:
        return b"".join(self._line(part) for delta in deltas.values() for part in self._parts_of(delta))

    def ending(self) -> bytes:
        lines = [self._line(part) for part in self._parts(self._blocks.finish())]
        return b"".join([*lines, self._line(self._part() | self._ended(self._blocks.ended), is_last=True)])

    def failed(self, error: BatonError) -> bytes:
        return ollama_error_json(error) + b"\n"

    def whole(self, answers: Sequence[Delta]) -> bytes:
        answer = answers[0]
        blocks = whole_blocks(answer)
        calls = [block for block in blocks if block.kind is BlockKind.CALL and is_usable(block)]
        part = self._part(
            text_of(blocks, BlockKind.TEXT), text_of(blocks, BlockKind.THOUGHT), [self._call(call) for call in calls]
        )
        return self._line(part | self._logprobs(answer) | self._ended(answer), is_last=True)

    def _line(self, more: Json, *, is_last: bool = False) -> bytes:
        return ENCODER.encode(self._head | more | {"done": is_last}) + b"\n"

    def _parts_of(self, delta: Delta) -> list[Json]:
        parts = list(self._parts(self._blocks.feed(delta)))
        if not delta.logprobs or self._facts.plan.show.num_logprobs < 0:
            return parts
        return [*parts[:-1], (parts[-1] if parts else self._part()) | self._logprobs(delta)]

    def _parts(self, events: Iterable[BlockEvent]) -> Iterator[Json]:
        """A call is written when it is whole. A call that was cut off is left out."""
        for event in events:
            match event:
                case BlockGrew(Block(kind=BlockKind.TEXT), text):
                    yield self._part(text)
                case BlockGrew(Block(kind=BlockKind.THOUGHT), text):
                    yield self._part(thought=text)
                case BlockEnded(Block(kind=BlockKind.CALL) as call) if is_usable(call):
                    yield self._part(calls=[self._call(call)])

    def _call(self, block: Block) -> Json:
        arguments = json.loads(block.text or "{}")
        function = {"index": block.call, "name": block.name, "arguments": arguments}
        return {"id": self._facts.plan.show.form.call_id(block.call, block.name), "function": function}

    def _ended(self, ended: Delta) -> Json:
        if self._loading is not None:
            return {"done_reason": self._loading}
        reason = "length" if ended.finish_reason is FinishReason.LENGTH else "stop"
        return {"done_reason": reason} | self._metrics()

    def _metrics(self) -> Json:
        counts, times = self._facts.counts(), self._facts.times
        return {
            "total_duration": nanoseconds(times.last - times.arrived),
            "load_duration": 0,
            "prompt_eval_count": counts.prompt,
            "prompt_eval_duration": nanoseconds(times.first - times.arrived),
            "eval_count": counts.answer,
            "eval_duration": nanoseconds(times.last - times.first),
        }

    def _logprobs(self, delta: Delta) -> Json:
        if self._facts.plan.show.num_logprobs < 0:
            return {}
        entries = [
            self._scored(token, own.logprob)
            | {"top_logprobs": [self._scored(*top) for top in zip(own.top_ids, own.top_logprobs, strict=True)]}
            for token, own in zip(delta.ids, delta.logprobs, strict=True)
        ]
        return {"logprobs": entries}

    def _scored(self, token: int, logprob: float) -> Json:
        raw = self._facts.tokenizer.token_bytes(token)
        return {"token": self._names.of(token), "logprob": logprob, "bytes": list(raw)}


def text_of(blocks: Sequence[Block], kind: BlockKind) -> str:
    return "".join(block.text for block in blocks if block.kind is kind)


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * NANOSECONDS))


def time_text(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
