"""Apply stop strings to an answer's texts. Calls are not text: a stop string ends none."""

from __future__ import annotations

from collections.abc import Iterable

from router.text.stops import StopMatcher
from router.tools.calls.deltas import AnswerDelta, CallArguments, CallBegun, ContentText, ReasoningText


class TextStops:
    """Reasoning, and the contents before, between and after calls, are texts of their own."""

    def __init__(self, matcher: StopMatcher) -> None:
        self._matcher = matcher
        self._kind: type[ContentText | ReasoningText] = ContentText  # of the text that is held back

    def feed(self, parts: Iterable[AnswerDelta]) -> list[AnswerDelta]:
        """Return the parts that may be shown now; none behind a match."""
        shown: list[AnswerDelta] = []
        for part in parts:
            if self._matcher.matched is not None:
                break
            if isinstance(part, CallBegun | CallArguments):
                shown += [*self.flush(), part]
            else:
                shown += self._of_text(part)
        return shown

    def flush(self) -> list[AnswerDelta]:
        held = self._matcher.flush()
        return [self._kind(held)] if held else []

    def _of_text(self, part: ContentText | ReasoningText) -> list[AnswerDelta]:
        before = [] if isinstance(part, self._kind) else self.flush()
        self._kind = type(part)
        text = self._matcher.feed(part.text)
        return [*before, self._kind(text)] if text else before
