"""Split an answer into blocks (reasoning, texts, calls), for /v1/messages and /v1/responses. Sans-IO; knows no JSON.

deltas of tokens -> Blocks -> BlockBegun, BlockGrew, BlockGrew, BlockEnded, BlockBegun, ...

The boundaries of deltas do not change the blocks. White space next to a call begins no block of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from router.api.answer.choice_text import Delta
from router.tools.calls.deltas import AnswerDelta, CallArguments, CallBegun, ContentText, ReasoningText
from shared.core.states import FinishReason


class BlockKind(StrEnum):
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """`index`: the block's number in the answer. `call`: a call's number among the calls. `is_whole`: false if the
    answer's end cut the block off."""

    index: int
    kind: BlockKind
    name: str = ""  # the called function's name
    call: int = 0
    pieces: list[str] = field(default_factory=list)
    is_whole: bool = True

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockBegun:
    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrew:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnded:
    block: Block


BlockEvent = BlockBegun | BlockGrew | BlockEnded


class Blocks:
    """Splits one answer. Use each event before you take the next one, because its block grows in place."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.ended = Delta()  # the last delta, with the finish reason
        self._open: Block | None = None
        self._space: list[str] = []  # white space that is in no block yet

    def feed(self, delta: Delta) -> Iterator[BlockEvent]:
        if delta.finish_reason is not None:
            self.ended = delta
        for part in parts_of(delta):
            match part:
                case CallBegun():
                    yield from self._begin(BlockKind.CALL, part.name, part.index)
                case CallArguments():
                    yield from self._grow(part.text)
                case ReasoningText():
                    yield from self._take_text(BlockKind.THOUGHT, part.text)
                case ContentText():
                    yield from self._take_content(part.text)

    def finish(self) -> Iterator[BlockEvent]:
        if self._space and not self.all:
            yield from self._take_text(BlockKind.TEXT, "".join(self._space))
        last = self._open
        if last is not None:
            is_call = last.kind is BlockKind.CALL
            last.is_whole = self.ended.has_calls if is_call else self.ended.finish_reason is not FinishReason.LENGTH
        yield from self._end()

    def cut(self) -> None:
        if self._open is not None:
            self._open.is_whole = False

    def _take_content(self, text: str) -> Iterator[BlockEvent]:
        if self._open is not None and self._open.kind is BlockKind.TEXT:
            yield from self._grow(text)
            return
        self._space.append(text)
        if not text.isspace():
            yield from self._take_text(BlockKind.TEXT, "".join(self._space))

    def _take_text(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        yield from self._grow(text)

    def _begin(self, kind: BlockKind, name: str = "", call: int = 0) -> Iterator[BlockEvent]:
        yield from self._end()
        self._space = []
        self._open = Block(len(self.all), kind, name, call)
        self.all.append(self._open)
        yield BlockBegun(self._open)

    def _grow(self, text: str) -> Iterator[BlockEvent]:
        assert self._open is not None
        self._open.pieces.append(text)
        yield BlockGrew(self._open, text)

    def _end(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield BlockEnded(self._open)
            self._open = None


def parts_of(delta: Delta) -> list[AnswerDelta]:
    """In a plain answer, all text is content."""
    return delta.parts or ([ContentText(delta.text)] if delta.text else [])


def whole_blocks(answer: Delta) -> list[Block]:
    blocks = Blocks()
    for _ in itertools.chain(blocks.feed(answer), blocks.finish()):
        pass
    return blocks.all
