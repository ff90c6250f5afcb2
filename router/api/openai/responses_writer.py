"""Write answers of /v1/responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from router.api.answer.blocks import (
    Block,
    BlockBegun,
    BlockEnded,
    BlockEvent,
    BlockGrew,
    BlockKind,
    Blocks,
    whole_blocks,
)
from router.api.answer.choice_text import Delta
from router.api.answer.writer import COMMENT, ENCODER, SSE_HEADERS, AnswerFacts, named_event
from shared.core.errors import BatonError
from shared.core.states import FinishReason

Json = dict[str, object]
ID_PREFIXES = {BlockKind.THOUGHT: "rs_", BlockKind.TEXT: "msg_", BlockKind.CALL: "fc_"}
STATELESS: Json = {"background": False, "previous_response_id": None, "store": False, "truncation": "disabled"}
ERROR_CODES = {429: "rate_limit_exceeded"}  # HTTP status -> code
IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"


class ResponsesWriter:
    """See `router.api.answer.writer.Writer`. Answers have one choice. `echo`: request fields that answers repeat."""

    headers: Sequence[tuple[bytes, bytes]] = SSE_HEADERS
    ping = COMMENT

    def __init__(self, facts: AnswerFacts, echo: Mapping[str, object]) -> None:
        self.answer_id = f"resp_{facts.token}"
        self._facts = facts
        self._echo = echo
        self._blocks = Blocks()
        self.num_events = 0

    def opening(self) -> bytes:
        return b"".join(
            self._event(f"response.{name}", response=self._response(IN_PROGRESS, []))
            for name in ("created", IN_PROGRESS)
        )

    def more(self, deltas: Mapping[int, Delta]) -> bytes:
        return self._events(event for delta in deltas.values() for event in self._blocks.feed(delta))

    def ending(self) -> bytes:
        data = self._events(self._blocks.finish())
        status = status_of(self._blocks.ended)
        return data + self._event(f"response.{status}", response=self._response(status, self._blocks.all))

    def failed(self, error: BatonError) -> bytes:
        data = b"" if self.num_events else self.opening()
        self._blocks.cut()
        response = self._response(FAILED, self._blocks.all) | {"error": failure(error)}
        return data + self._event("response.failed", response=response)

    def whole(self, answers: Sequence[Delta]) -> bytes:
        return ENCODER.encode(self._response(status_of(answers[0]), whole_blocks(answers[0])))

    def _response(self, status: str, blocks: Sequence[Block]) -> Json:
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self._facts.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "model": self._facts.plan.model,
            "output": [self._item(block) for block in blocks],
            "usage": None if status == IN_PROGRESS else self._usage(),
            **STATELESS,
            **self._echo,
        }

    def _usage(self) -> Json:
        counts = self._facts.counts()
        return {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
            "output_tokens": counts.answer,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning or 0},
            "total_tokens": counts.prompt + counts.answer,
        }

    # ---- events

    def _event(self, kind: str, /, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self.num_events, **fields}
        self.num_events += 1
        return named_event(event)

    def _events(self, events: Iterable[BlockEvent]) -> bytes:
        return b"".join(data for event in events for data in self._of_block(event))

    def _of_block(self, event: BlockEvent) -> Iterable[bytes]:
        match event:
            case BlockBegun(block):
                return self._begun(block)
            case BlockGrew(block, text):
                name = STEMS[block.kind]
                logprobs: Json = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
                return [self._event(f"{name}.delta", **self._place(block), delta=text, **logprobs)]
            case BlockEnded(block):
                return self._ended(block)

    def _begun(self, block: Block) -> Iterable[bytes]:
        yield self._event("response.output_item.added", output_index=block.index, item=self._item(block, IN_PROGRESS))
        if block.kind is not BlockKind.CALL:
            yield self._event("response.content_part.added", **self._place(block), part=part_of(block))

    def _ended(self, block: Block) -> Iterable[bytes]:
        name, place = STEMS[block.kind], self._place(block)
        match block.kind:
            case BlockKind.THOUGHT:
                yield self._event(f"{name}.done", **place, text=block.text)
            case BlockKind.TEXT:
                yield self._event(f"{name}.done", **place, text=block.text, logprobs=[])
            case BlockKind.CALL:
                yield self._event(f"{name}.done", **place, name=block.name, arguments=block.text)
        if block.kind is not BlockKind.CALL:
            yield self._event("response.content_part.done", **place, part=part_of(block))
        yield self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _place(self, block: Block) -> Json:
        place: Json = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind is BlockKind.CALL else place | {"content_index": 0}

    # ---- items

    def _item_id(self, block: Block) -> str:
        return f"{ID_PREFIXES[block.kind]}{self._facts.token}{block.index:04x}"

    def _item(self, block: Block, status: str = "") -> Json:
        """`status`: set for an item that has just begun, and has no parts yet."""
        parts = [] if status else [part_of(block)]
        known: Json = {"id": self._item_id(block), "status": status or (COMPLETED if block.is_whole else INCOMPLETE)}
        match block.kind:
            case BlockKind.THOUGHT:
                return known | {"type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
            case BlockKind.TEXT:
                return known | {"type": "message", "role": "assistant", "content": parts}
            case BlockKind.CALL:
                call_id = self._facts.plan.show.form.call_id(block.call, block.name)
                own = {"call_id": call_id, "name": block.name, "arguments": block.text}
                return known | {"type": "function_call", **own}


STEMS = {
    BlockKind.THOUGHT: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}  # how the names of a block's events begin


def part_of(block: Block) -> Json:
    if block.kind is BlockKind.THOUGHT:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def status_of(ended: Delta) -> str:
    return INCOMPLETE if ended.finish_reason is FinishReason.LENGTH else COMPLETED


def failure(error: BatonError) -> Json:
    code = ERROR_CODES.get(error.status, "invalid_prompt" if error.status < 500 else "server_error")
    return {"code": code, "message": error.message}
