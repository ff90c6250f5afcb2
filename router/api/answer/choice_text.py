"""Turn one choice's tokens into visible text. Knows no JSON.

ids -> Detokenizer -> StopMatcher -> text                      if all text is content
ids -> Detokenizer -> AnswerReader -> StopMatcher -> parts     if an answer may hold reasoning or calls

A stop string cuts text and tokens at the token that completed it. It ends text, not calls. A stop string with a tag of
reasoning is looked for before the reader, which shows no tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from router.api.answer.generation_plan import AnswerForm, ShowOptions
from router.certify.record import GivenCertificate
from router.text.chat.interface import Tokenizer
from router.text.detokenizer import Detokenizer
from router.text.stops import StopMatcher
from router.tools.answer import AnswerReader
from router.tools.calls.deltas import AnswerDelta, ReasoningText
from router.tools.reasoning import has_tag
from router.tools.text_stops import TextStops
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.wire.messages import TokenLogprob


@dataclass(slots=True)
class Delta:
    """What one batch of news adds to a choice. `offsets`: characters before each token, only with logprobs."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    parts: list[AnswerDelta] = field(default_factory=list)  # used instead of `text` if not all text is content
    finish_reason: FinishReason | None = None
    has_calls: bool = False  # set in the last delta
    stopped_by: str = ""  # the matched stop string, set in the last delta
    certificate: GivenCertificate | UnsetType = UNSET  # set in the last delta, if asked for

    def add(self, more: Delta) -> None:
        self.text += more.text
        self.ids += more.ids
        self.logprobs += more.logprobs
        self.offsets += more.offsets
        self.parts += more.parts
        self.finish_reason = more.finish_reason or self.finish_reason
        self.has_calls = more.has_calls or self.has_calls
        self.stopped_by = more.stopped_by or self.stopped_by
        self.certificate = more.certificate or self.certificate


def reader_of(form: AnswerForm) -> AnswerReader:
    return AnswerReader(form.row, form.tools, form.thought, form.markers, template=form.template, opened=form.opened)


class ChoiceText:
    """`num_tokens`: tokens that a client pays for, including the stop token."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, show: ShowOptions, num_before: int = 0) -> None:
        """`num_before`: the echo's number of characters, which all offsets include."""
        form = show.form
        self._detokenizer = Detokenizer(
            tokenizer, shows_special=show.shows_special, shown_ids=frozenset(form.markers.values())
        )
        self._reader = None if form.is_plain else reader_of(form)
        self._is_thinking = form.is_in_thought
        self.num_reasoning = 0  # reasoning tokens
        raw = [stop for stop in show.stops if form.is_plain or has_tag(stop, form.thought)]
        self._matcher = StopMatcher(raw, keeps=show.keeps_stop)
        self._part_matcher = StopMatcher([stop for stop in show.stops if stop not in raw], keeps=show.keeps_stop)
        self._part_stops = TextStops(self._part_matcher)
        self._silent_ids = frozenset() if show.keeps_stop else frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens
        self._wants_offsets = show.num_logprobs >= 0
        self._num_chars = num_before
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    @property
    def has_calls(self) -> bool:
        """Whether an answer that has ended calls tools."""
        return self._reader is not None and self._reader.num_calls > 0 and not self._reader.is_in_call

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Delta:
        delta = Delta()
        used = 0
        for token in ids:
            used += 1
            if self._wants_offsets:
                delta.offsets.append(self._num_chars)
            self._show(self._feed_one(token), delta)
            self.num_reasoning += self._is_thinking
            if self._stopped_by:
                self._end(FinishReason.STOP, delta)
                break
        delta.ids = list(ids[:used])
        delta.logprobs = list(logprobs[:used])
        return delta

    def finish(self, reason: FinishReason) -> Delta:
        delta = Delta()
        self._show(self._matcher.flush(), delta)
        self._end(reason, delta)
        return delta

    @property
    def _stopped_by(self) -> str:
        return self._matcher.matched or self._part_matcher.matched or ""

    def _show(self, text: str, delta: Delta) -> None:
        if self._reader is None:
            delta.text += text
        else:
            self._take_parts(self._reader.feed(text), delta)

    def _end(self, reason: FinishReason, delta: Delta) -> None:
        if self._reader is not None:
            self._take_parts(self._reader.finish(is_cut=reason is FinishReason.LENGTH), delta)
            delta.parts += self._part_stops.flush()
            delta.has_calls = self.has_calls
        delta.stopped_by = self._stopped_by  # also by text that the reader held back
        self.finish_reason = delta.finish_reason = FinishReason.STOP if delta.stopped_by else reason

    def _take_parts(self, parts: list[AnswerDelta], delta: Delta) -> None:
        counts_stops = self.num_tokens > self._min_tokens
        delta.parts += self._part_stops.feed(parts) if counts_stops else parts
        if parts:
            self._is_thinking = isinstance(parts[-1], ReasoningText)

    def _feed_one(self, token: int) -> str:
        self.num_tokens += 1
        if token in self._silent_ids:
            return ""
        piece = self._detokenizer.feed(token)
        self._num_chars += len(piece)
        if self.num_tokens <= self._min_tokens:
            return piece  # stop strings count only after min_tokens tokens
        return self._matcher.feed(piece)
