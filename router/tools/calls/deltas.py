"""The parts of an answer as they grow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """`index`: the call's number in the answer, from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. The pieces of a complete call form a JSON object, if the model wrote one."""

    index: int
    text: str


AnswerDelta = ContentText | ReasoningText | CallBegun | CallArguments


@dataclass(frozen=True, slots=True)
class WholeCall:
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    content: str
    reasoning: str
    calls: tuple[WholeCall, ...]


class DeltaSink:
    """Collects deltas, and joins neighbouring texts of one kind."""

    __slots__ = ("_deltas", "is_in_call", "num_calls")

    def __init__(self) -> None:
        self._deltas: list[AnswerDelta] = []
        self.num_calls = 0
        self.is_in_call = False

    def content(self, text: str) -> None:
        self._add(ContentText(text))

    def reasoning(self, text: str) -> None:
        self._add(ReasoningText(text))

    def begin_call(self, name: str) -> None:
        self._deltas.append(CallBegun(self.num_calls, name))
        self.num_calls += 1
        self.is_in_call = True

    def arguments(self, text: str) -> None:
        self._add(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        self.is_in_call = False

    def taken(self) -> list[AnswerDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _add(self, delta: ContentText | ReasoningText | CallArguments) -> None:
        if not delta.text:
            return
        last = self._deltas[-1] if self._deltas else None
        if last is not None and not isinstance(last, CallBegun) and replace(last, text=delta.text) == delta:
            self._deltas[-1] = replace(last, text=last.text + delta.text)
        else:
            self._deltas.append(delta)


def whole_answer(deltas: Iterable[AnswerDelta]) -> WholeAnswer:
    texts: dict[type, list[str]] = {ContentText: [], ReasoningText: []}
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case CallBegun():
                names.append(delta.name)
                arguments.append([])
            case CallArguments():
                arguments[delta.index].append(delta.text)
            case _:
                texts[type(delta)].append(delta.text)
    calls = tuple(WholeCall(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True))
    return WholeAnswer("".join(texts[ContentText]), "".join(texts[ReasoningText]), calls)
