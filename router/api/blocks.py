"""An answer as a row of blocks: thoughts, texts and calls, one after the other. Sans-IO; knows no JSON.

deltas of tokens -> Blocks -> BlockBegun, BlockGrew, BlockGrew, BlockEnded, BlockBegun, ...

However the text is cut, the blocks are the same. White space beside a call makes no block of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from router.api.choice_text import Delta
from router.tools.deltas import AnswerDelta, CallArguments, CallBegun, ContentText, ReasoningText
from shared.core.states import FinishReason


class BlockKind(StrEnum):
    THOUGHT = "thought"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """`index` counts blocks, `call` counts calls. `is_whole`: nothing of it was cut off at the answer's end."""

    index: int
    kind: BlockKind
    name: str = ""  # of the function that is called
    call: int = 0
    pieces: list[str] = field(default_factory=list)
    is_whole: bool = True

    @property
    def text(self) -> str:
        """Of a call: its arguments."""
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
    """One per answer. After `finish` there is nothing more to feed. An event is to be used before the next is asked
    for: its block grows."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.ended = Delta()  # says why the answer ended
        self._open: Block | None = None
        self._space: list[str] = []  # white space that may turn out to lie between blocks

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
                    yield from self._take(BlockKind.THOUGHT, part.text)
                case ContentText():
                    yield from self._take_content(part.text)

    def finish(self) -> Iterator[BlockEvent]:
        """The answer is complete."""
        if self._space and not self.all:
            yield from self._take(BlockKind.TEXT, "".join(self._space))
        last = self._open
        if last is not None:
            is_call = last.kind is BlockKind.CALL
            last.is_whole = self.ended.has_calls if is_call else self.ended.finish_reason is not FinishReason.LENGTH
        yield from self._end()

    def cut(self) -> None:
        """The answer goes no further: what is open stays as it is, and is not whole."""
        if self._open is not None:
            self._open.is_whole = False

    def _take_content(self, text: str) -> Iterator[BlockEvent]:
        if self._open is not None and self._open.kind is BlockKind.TEXT:
            yield from self._grow(text)
            return
        self._space.append(text)
        if not text.isspace():
            yield from self._take(BlockKind.TEXT, "".join(self._space))

    def _take(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
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
    """Return what a delta adds. Where all text is content, it has no parts of its own."""
    return delta.parts or ([ContentText(delta.text)] if delta.text else [])


def whole_blocks(answer: Delta) -> list[Block]:
    """Return the blocks of an answer that has ended."""
    blocks = Blocks()
    for _ in itertools.chain(blocks.feed(answer), blocks.finish()):
        pass
    return blocks.all
