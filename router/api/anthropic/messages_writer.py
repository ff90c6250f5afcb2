"""Write answers of /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

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
from router.api.answer.writer import ENCODER, SSE_HEADERS, AnswerFacts, named_event
from router.http.errors import messages_error
from shared.core.errors import BatonError
from shared.core.states import FinishReason

Json = dict[str, object]
NOT_ENDED: Json = {"stop_reason": None, "stop_sequence": None}
SIGNATURE = "baton"  # without a signature, clients send no reasoning back in later requests


class MessagesWriter:
    """See `router.api.answer.writer.Writer`. Answers have one choice."""

    headers: Sequence[tuple[bytes, bytes]] = SSE_HEADERS
    ping = named_event({"type": "ping"})
    num_events = 0  # not numbered

    def __init__(self, facts: AnswerFacts) -> None:
        self.answer_id = f"msg_{facts.token}"
        self._facts = facts
        self._blocks = Blocks()

    def opening(self) -> bytes:
        return named_event({"type": "message_start", "message": self._message([], NOT_ENDED)})

    def more(self, deltas: Mapping[int, Delta]) -> bytes:
        return self._events(event for delta in deltas.values() for event in self._blocks.feed(delta))

    def ending(self) -> bytes:
        data = self._events(self._blocks.finish())
        why = why_ended(self._blocks.ended)
        data += named_event({"type": "message_delta", "delta": why, "usage": self._usage()})
        return data + named_event({"type": "message_stop"})

    def failed(self, error: BatonError) -> bytes:
        return named_event(messages_error(error))

    def whole(self, answers: Sequence[Delta]) -> bytes:
        """Leave out cut-off and malformed calls: their input is not an object."""
        delta = answers[0]
        blocks = [block for block in whole_blocks(delta) if block.kind is not BlockKind.CALL or is_usable(block)]
        has_calls = any(block.kind is BlockKind.CALL for block in blocks)
        ended = replace(delta, has_calls=has_calls)
        return ENCODER.encode(self._message([self._whole_block(block) for block in blocks], why_ended(ended)))

    def _message(self, content: list[Json], why: Json) -> Json:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._facts.plan.model,
            "content": content,
            **why,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        """Cached tokens are not among the input tokens, and are known only at the end."""
        counts = self._facts.counts()
        return {
            "input_tokens": counts.prompt - counts.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached,
            "output_tokens": counts.answer,
        }

    def _events(self, events: Iterable[BlockEvent]) -> bytes:
        return b"".join(self._event(event) for event in events)

    def _event(self, event: BlockEvent) -> bytes:
        match event:
            case BlockBegun(block):
                more: Json = {"type": "content_block_start", "content_block": self._begun(block)}
            case BlockGrew(block, text):
                more = {"type": "content_block_delta", "delta": grown(block, text)}
            case BlockEnded(block):
                return self._ended(block)
        return named_event(more | {"index": event.block.index})

    def _ended(self, block: Block) -> bytes:
        events: list[Json] = [{"type": "content_block_stop"}]
        if block.kind is BlockKind.THOUGHT:
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            events.insert(0, {"type": "content_block_delta", "delta": signed})
        return b"".join(named_event(event | {"index": block.index}) for event in events)

    def _begun(self, block: Block) -> Json:
        match block.kind:
            case BlockKind.THOUGHT:
                return {"type": "thinking", "thinking": "", "signature": ""}
            case BlockKind.TEXT:
                return {"type": "text", "text": ""}
            case BlockKind.CALL:
                return {"type": "tool_use", "id": self._id_of(block), "name": block.name, "input": {}}

    def _whole_block(self, block: Block) -> Json:
        begun = self._begun(block)
        match block.kind:
            case BlockKind.THOUGHT:
                return begun | {"thinking": block.text, "signature": SIGNATURE}
            case BlockKind.TEXT:
                return begun | {"text": block.text}
            case BlockKind.CALL:
                return begun | {"input": msgspec.Raw((block.text or "{}").encode())}

    def _id_of(self, block: Block) -> str:
        """Replace the prefix `call_` by Anthropic's. Short ids, which some templates require, have no prefix."""
        return self._facts.plan.show.form.call_id(block.call, block.name).replace("call_", "toolu_", 1)


def grown(block: Block, text: str) -> Json:
    match block.kind:
        case BlockKind.THOUGHT:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
        case BlockKind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


def is_usable(call: Block) -> bool:
    try:
        return call.is_whole and isinstance(json.loads(call.text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def why_ended(ended: Delta) -> Json:
    return {"stop_reason": stop_reason(ended), "stop_sequence": ended.stopped_by or None}


def stop_reason(ended: Delta) -> str:
    if ended.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    if ended.stopped_by:
        return "stop_sequence"
    return "tool_use" if ended.has_calls else "end_turn"
