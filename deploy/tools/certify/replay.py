"""Compute certified answers again with one plain engine, many at a time, and judge where they differ.

    certified tokens --compare--> equal
                        '--first difference--> both tokens' scores there --margin > tie--> differs
                                                    '--margin <= tie: a near tie--> go on behind it

An engine's own kernels have no ties: there the first difference ends it. A library's rounding depends on the batch, so
the check at its loading says how far two logits may move (`ModelSpec.tie`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch

from deploy.tools.certify.formats import advice
from router.certify.record import NEAR_TIES, AnswerRecord, CertifiedNumerics, certified_ids
from shared.core.keys import RequestKey, sequence_seed
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.kernel.sampling.noise import noise_bits, row_keys, torch_gumbel
from shared.kernel.sampling.sample_constants import GREEDY_BELOW
from shared.model.formats.opened import PLAIN_END
from shared.node.assembly.fingerprint import build_name, make_fingerprint
from shared.node.records.core import NodeCore
from shared.sched.steps.events import Emitted, Ended
from shared.wire.messages import TokenLogprob

AHEAD = 2  # requests at the engine, in multiples of the rows that it runs together


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """`token_ids`: None if they are not shown; then only their digest is compared. `salt`: the certificate's."""

    name: str
    record: AnswerRecord
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    salt: bytes
    token_ids: Sequence[int] | None

    @property
    def count(self) -> int:
        return self.record.tokens.count

    def holds(self, ids: Sequence[int]) -> bool:
        if self.token_ids is not None:
            return list(ids) == list(self.token_ids)
        return certified_ids(self.salt, "tokens", ids) == self.record.tokens


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    """`is_equal`: None if the engine could not tell."""

    is_equal: bool | None
    text: str


class ScoredToken(NamedTuple):
    token: int
    logprob: float


class Probe(Enum):
    """Which token's score a run asks for, if only for one: the engine's own, or the certified one."""

    NONE = "none"
    OWN = "own"
    CERTIFIED = "certified"


@dataclass(slots=True, eq=False)
class RunningReplay:
    """`ids`: the certified ones before `start`, then the engine's. `own`: the result of Probe.OWN."""

    task: ReplayTask
    probe: Probe = Probe.NONE
    ids: list[int] = field(default_factory=list)
    start: int = 0
    ties: tuple[str, ...] = ()
    own: ScoredToken | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def scored(self) -> ScoredToken:
        return ScoredToken(self.ids[self.start], self.logprobs[0].logprob)

    def params(self) -> SamplingParams:
        """A probe asks for the score of one token. Scores come before all that a request does to them."""
        task = self.task
        most = task.count if self.probe is Probe.NONE else self.start + 1
        own = replace(task.sampling, max_tokens=most, num_logprobs=-1, prompt_logprobs=-1)
        if self.probe is Probe.CERTIFIED:
            assert task.token_ids is not None
            return SamplingParams(
                most, temperature=0.0, allowed_token_ids=(task.token_ids[self.start],), num_logprobs=0
            )
        return own if self.probe is Probe.NONE else replace(own, num_logprobs=0)


class Replayer:
    """Owns no core: who made the core closes it."""

    def __init__(self, core: NodeCore, page_size: int) -> None:
        self._core = core
        fingerprint = make_fingerprint(core.spec, core.pool.planes, page_size, None, build_name())
        self.numerics = CertifiedNumerics.of_node(fingerprint)
        self._running: dict[RequestKey, RunningReplay] = {}
        self._num_asked = 0

    def misfit(self, record: AnswerRecord) -> str:
        """Return why this engine does not compute what the certificate's nodes did, and what to do; "" if it does."""
        if len(record.nodes) > 1:
            return "nodes of different kinds had this request, one after the other: no engine replays both"
        (node,) = record.nodes
        if PLAIN_END in node.weights:
            return "plain torch computed it, and its sums depend on its version and the processor"
        name = node.differs_from(self.numerics)
        if name is not None:
            values = f"{getattr(node, name)!r} in the certificate and {getattr(self.numerics, name)!r} here"
            return f"another fingerprint: {name} is {values}: {advice(name, node, self.numerics)}"
        if record.adapter and record.adapter not in {adapter.digest for adapter in self._core.spec.adapters}:
            return f"the certificate names the adapter {record.adapter!r}: give it with --lora NAME=PATH"
        return ""

    def run(self, tasks: Iterable[ReplayTask]) -> Iterator[tuple[ReplayTask, ReplayVerdict]]:
        """Yield verdicts as they come."""
        most = AHEAD * self._core.kv.rows.num_total
        waiting = iter(tasks)
        task = next(waiting, None)
        while task is not None or self._running:
            while task is not None and len(self._running) < most:
                if why := self.misfit(task.record):
                    yield task, ReplayVerdict(None, f"not computed: {why}")
                elif task.count:
                    self._begin_run(RunningReplay(task))
                else:
                    yield task, verdict_of_none(task)
                task = next(waiting, None)
            if self._running:
                self._core.step(block=True)
                yield from self._take_events()

    def _begin_run(self, replay: RunningReplay) -> None:
        task, self._num_asked = replay.task, self._num_asked + 1
        key = RequestKey("replay", 0, str(self._num_asked), 0, 0)
        self._running[key] = replay
        self._core.submit(
            Request(
                key,
                NodeAsk(
                    np.asarray(task.prompt_ids, dtype=np.int64),
                    replay.params(),
                    sequence_seed(task.record.seed, task.record.sequence),
                    adapter=task.record.adapter,
                ),
                self._num_asked,
                output_ids=list(replay.ids),
            )
        )

    def _take_events(self) -> Iterator[tuple[ReplayTask, ReplayVerdict]]:
        for event in self._core.take_events():
            if isinstance(event, Emitted) and (replay := self._running.get(event.key)) is not None:
                known = len(replay.ids) - event.first_pos
                replay.ids += event.ids[known:]
                replay.logprobs += event.logprobs[known:]
            elif isinstance(event, Ended) and (replay := self._running.pop(event.key, None)) is not None:
                verdict = self._judge(replay, event)
                if verdict is not None:
                    yield replay.task, verdict

    def _judge(self, replay: RunningReplay, end: Ended) -> ReplayVerdict | None:
        """Return None if the answer must be asked for further."""
        task = replay.task
        if end.error is not None:
            return ReplayVerdict(None, f"not computed: {end.error.message}")
        if replay.probe is not Probe.NONE:
            return self._judge_token(replay)
        if task.holds(replay.ids):
            return equal(task, end.reason, replay.ties)
        if task.token_ids is None:
            text = "DIFFERS somewhere: token ids are not shown with the certificate, so it can't be said where"
            return ReplayVerdict(False, text)
        pairs = enumerate(zip(task.token_ids, replay.ids, strict=False))
        place = next((place for place, (certified, own) in pairs if certified != own), len(replay.ids))
        if place == len(replay.ids):
            return ReplayVerdict(
                False, f"DIFFERS: the engine's answer ends after {place} tokens, the certified one later"
            )
        self._begin_run(RunningReplay(task, Probe.OWN, replay.ids[:place], place, replay.ties))
        return None

    def _judge_token(self, replay: RunningReplay) -> ReplayVerdict | None:
        task, place = replay.task, replay.start
        if replay.probe is Probe.OWN:
            before = replay.ids[:place]
            self._begin_run(RunningReplay(task, Probe.CERTIFIED, before, place, replay.ties, own=replay.scored()))
            return None
        assert task.token_ids is not None and replay.own is not None
        own, certified = replay.own, replay.scored()
        margin = margin_of(task, place, own, certified)
        where = (
            f"token {place} is {certified.token} in the certificate and {own.token} here, {margin:.3g} apart in score"
        )
        if abs(margin) > self._tie(task):
            return ReplayVerdict(False, f"DIFFERS: {where}{behind(replay.ties)}")
        ties, ids = (*replay.ties, where), list(task.token_ids[: place + 1])
        if len(ids) == task.count:
            return equal(task, None, ties)
        self._begin_run(RunningReplay(task, Probe.NONE, ids, len(ids), ties))
        return None

    def _tie(self, task: ReplayTask) -> float:
        if task.record.replays != NEAR_TIES:
            return 0.0
        temperature = task.sampling.temperature
        return self._core.spec.tie / (1.0 if temperature < GREEDY_BELOW else temperature)


def equal(task: ReplayTask, reason: FinishReason | None, ties: Sequence[str]) -> ReplayVerdict:
    """The tokens are equal. The end must be, too. `reason`: None if the engine did not come to the end."""
    fault = fault_of_end(task, reason)
    if fault:
        return ReplayVerdict(False, f"DIFFERS: equal tokens, but {fault}")
    return ReplayVerdict(True, f"equal{behind(ties)}")


def fault_of_end(task: ReplayTask, reason: FinishReason | None) -> str:
    """Return "" for a possible end. The router may end an answer at a stop string, but at no other place."""
    said, count, most = task.record.finish_reason, task.count, task.sampling.max_tokens
    if said == FinishReason.LENGTH and count != most:
        return f"the certificate says length after {count} of {most} tokens"
    if reason in (None, said) or (said == FinishReason.STOP and task.record.stop is not None):
        return ""
    return f"the certificate says {said}, the engine {reason}"


def verdict_of_none(task: ReplayTask) -> ReplayVerdict:
    """Return the verdict on no tokens. Nodes compute one for an `echo` with max_tokens=0, which is not shown."""
    if task.record.finish_reason == FinishReason.LENGTH and task.sampling.max_tokens == 1:
        return ReplayVerdict(True, "equal: an answer of no tokens")
    return ReplayVerdict(False, "DIFFERS: no tokens, but every answer has one")


def behind(ties: Sequence[str]) -> str:
    return f", but for {len(ties)} near ties: {'; '.join(ties)}" if ties else ""


def margin_of(task: ReplayTask, place: int, own: ScoredToken, certified: ScoredToken) -> float:
    """Return by how much the engine's token wins: of what the sampler compares, before penalties, biases and filters.

    That is the log-probability, or when drawing, log-probability / temperature + noise
    (shared/kernel/sampling/noise.py)."""
    temperature = task.sampling.temperature
    if temperature < GREEDY_BELOW:
        return own.logprob - certified.logprob
    keys = row_keys(sequence_seed(task.record.seed, task.record.sequence), len(task.prompt_ids) + place)
    bits = torch.tensor([noise_bits(*keys, one.token) for one in (own, certified)])
    noise: list[float] = torch_gumbel(bits).tolist()
    return (own.logprob - certified.logprob) / temperature + noise[0] - noise[1]
