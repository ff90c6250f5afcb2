"""HTTP requests of the simulation and the oracle of their streams: a prefix of the reference at all times, the whole
of it at a good end, or one declared error; nothing twice, nothing out of order, nothing after the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.requests.effects import Failure, News, ScoredPrompt, Update
from router.requests.mailbox import Mailbox
from router.requests.new_request import NewRequest
from shared.core.errors import BatonError
from shared.core.keys import sequence_seed
from shared.core.sampling_params import SamplingParams
from shared.model.hashlm.model import VOCAB_SIZE
from shared.wire.messages import TokenLogprob
from tests.support.oracles.grammar_oracle import allows_of
from tests.support.oracles.hashlm_reference import ReferenceRun, reference_run, seq2seq_run
from tests.support.sim.hosts import RouterHost
from tests.support.sim.plan import ClientPlan, RequestPlan

LOGPROB_SLACK = 1e-4


class WrongStream(AssertionError):
    """What a client got is not what the request must give. `rid` names it in the trace."""

    def __init__(self, rid: str, what: str) -> None:
        super().__init__(f"{rid}: {what}")
        self.rid = rid


@dataclass
class Stream:
    """One sequence as its client sees it."""

    name: str
    reference: ReferenceRun
    num_logprobs: int
    closes_at: int | None
    ids: list[int] = field(default_factory=list)
    is_over: bool = False
    prompt: tuple[int, ...] = ()  # where it is to be scored
    windows: tuple[int, int | None] = (0, None)
    num_scores: int = 0
    was_just_closed: bool = False  # by the router: what it had taken before is still in the mailbox

    def take(self, update: Update) -> None:
        if self.was_just_closed:
            return
        if self.is_over:
            raise WrongStream(self.name, f"{len(update.ids)} tokens after its end")
        if update.ids and self.prompt and self.num_scores != len(self.prompt) - 1:
            raise WrongStream(self.name, f"a token behind {self.num_scores} of {len(self.prompt) - 1} scores")
        first = len(self.ids)
        wanted = self.reference.ids[first : first + len(update.ids)]
        if list(update.ids) != wanted:
            raise WrongStream(self.name, f"tokens {list(update.ids)} at {first} where {wanted} must be")
        self._check_logprobs(first, update)
        self.ids.extend(update.ids)
        if update.end is not None:
            self._check_end(update)

    def take_scores(self, entries: Sequence[TokenLogprob]) -> None:
        """The last of them is compared: each message ends elsewhere."""
        if self.ids or self.is_over:
            raise WrongStream(self.name, "scores of its prompt behind its tokens")
        self.num_scores += len(entries)
        if self.num_scores >= len(self.prompt):
            raise WrongStream(self.name, f"{self.num_scores} scores for {len(self.prompt)} prompt tokens")
        before, token = self.prompt[: self.num_scores], self.prompt[self.num_scores]
        forced = SamplingParams(1, 0.0, logit_bias=((token, 1000.0),), num_logprobs=0)
        wanted = reference_run(before, forced, 0, 1, VOCAB_SIZE, *self.windows).logprobs[0]
        if not math.isclose(entries[-1].logprob, wanted, abs_tol=LOGPROB_SLACK):
            raise WrongStream(self.name, f"score {entries[-1].logprob} at {self.num_scores} where {wanted} must be")

    def _check_logprobs(self, first: int, update: Update) -> None:
        if self.num_logprobs < 0:
            if update.logprobs:
                raise WrongStream(self.name, "logprobs that nobody asked for")
            return
        if len(update.logprobs) != len(update.ids):
            raise WrongStream(self.name, f"{len(update.logprobs)} logprobs with {len(update.ids)} tokens")
        for offset, entry in enumerate(update.logprobs):
            wanted = self.reference.logprobs[first + offset]
            if not math.isclose(entry.logprob, wanted, abs_tol=LOGPROB_SLACK):
                raise WrongStream(self.name, f"logprob {entry.logprob} at {first + offset} where {wanted} must be")
            if len(entry.top_ids) != self.num_logprobs or len(entry.top_logprobs) != self.num_logprobs:
                raise WrongStream(self.name, f"{len(entry.top_ids)} top logprobs where {self.num_logprobs} must be")

    def _check_end(self, update: Update) -> None:
        self.is_over = True
        assert update.end is not None
        if len(self.ids) != len(self.reference.ids):
            raise WrongStream(self.name, f"ended after {len(self.ids)} of {len(self.reference.ids)} tokens")
        if update.end.reason != self.reference.finish_reason:
            raise WrongStream(self.name, f"ended by {update.end.reason}, not {self.reference.finish_reason}")
        if update.end.num_output_tokens != len(self.ids):
            raise WrongStream(self.name, f"usage says {update.end.num_output_tokens} of {len(self.ids)} tokens")


def streams_of(name: str, request: RequestPlan) -> list[Stream]:
    closes = dict(request.closes)
    sampling = request.sampling
    return [
        Stream(
            f"{name}.{index}",
            reference_of(request, sequence_seed(request.seed, index)),
            sampling.num_logprobs,
            closes.get(index),
            prompt=request.prompt if index == 0 and sampling.prompt_logprobs >= 0 else (),
            windows=request.windows,
        )
        for index in range(request.num_sequences)
    ]


def reference_of(request: RequestPlan, seed: int) -> ReferenceRun:
    sampling = request.sampling
    if request.encoder:
        return seq2seq_run(request.prompt, sampling, seed, sampling.max_tokens)
    allows = allows_of(sampling.grammar)
    model = VOCAB_SIZE, *request.windows
    return reference_run(request.prompt, sampling, seed, sampling.max_tokens, *model, allows=allows)


class Client:
    """One HTTP request: opens, reads, sometimes hangs up or finds a stop string, and closes when it has everything.

    `outcome` is None while it is open, then done, hung up, or the code of the error it got.
    """

    def __init__(self, number: int, plan: ClientPlan) -> None:
        self.name = f"c{number}"
        self.plan = plan
        self.outcome: str | None = None
        self.opened_at = 0.0
        self.ended_at = 0.0
        self.router: RouterHost | None = None
        self.refusals = 0
        self._life = 0
        self._mailbox: Mailbox | None = None
        self._streams: dict[str, list[Stream]] = {}
        self.num_tokens = 0

    @property
    def is_open(self) -> bool:
        return self._mailbox is not None and self.outcome is None

    @property
    def rids(self) -> list[str]:
        return list(self._streams)

    @property
    def names(self) -> list[tuple[str, int, str]]:
        """Its requests as nodes name them: router id, epoch and rid."""
        if self.router is None:
            return []
        plan = self.router.plan
        return [(plan.router_id, plan.first_epoch + self._life, rid) for rid in self._streams]

    def open(self, router: RouterHost, now: float) -> None:
        self.router, self._life, self.opened_at = router, router.lives, now
        if router.gateway is None:
            self._over("connection refused", now)
            return
        news = [NewRequest(list(r.prompt), r.num_sequences, r.sampling, r.seed) for r in self.plan.requests]
        try:
            self._mailbox = router.gateway.open(news)
        except BatonError as error:
            self._over(error.code, now)
            return
        for rid, request in zip(self._mailbox.rids, self.plan.requests, strict=True):
            name = f"{router.name}/{rid}#"
            self._streams[rid] = streams_of(name, request)

    def refused(self) -> None:
        """Not admitted; it will try again."""
        self.refusals += 1
        self.outcome = None

    def read(self, now: float) -> None:
        """Everything in the mailbox, as the task of an HTTP request would take it."""
        if not self.is_open:
            return
        assert self.router is not None and self._mailbox is not None
        if self.router.lives != self._life or self.router.gateway is None:
            self._over("router died", now)
            return
        news, self._mailbox._news = self._mailbox._news, []
        for item in news:
            self._take(item, now)
            if self.outcome is not None:
                return
        for stream in self._all():
            stream.was_just_closed = False
        self._check_over(now)

    def _take(self, item: News, now: float) -> None:
        if isinstance(item, Failure):
            self.close(item.error.code, now)
            return
        if isinstance(item, ScoredPrompt):
            self._streams[item.rid][0].take_scores(item.logprobs)
            return
        stream = self._streams[item.rid][item.seq_index]
        stream.take(item)
        self.num_tokens += len(item.ids)
        hang_up = self.plan.hangs_up_after
        if stream.closes_at is not None and not stream.is_over and len(stream.ids) >= stream.closes_at:
            stream.is_over = stream.was_just_closed = True
            assert self.router is not None and self.router.gateway is not None
            self.router.gateway.close_sequence(item.rid, item.seq_index)
        if hang_up is not None and hang_up < 0 and self.num_tokens >= -hang_up:
            self.close("hung up", now)

    def _check_over(self, now: float) -> None:
        if all(stream.is_over for stream in self._all()):
            self.close("done", now)

    def _all(self) -> list[Stream]:
        return [stream for streams in self._streams.values() for stream in streams]

    def close(self, outcome: str, now: float) -> None:
        """Whatever is still open of it is not wanted any more."""
        assert self.router is not None and self.router.gateway is not None and self._mailbox is not None
        self._over(outcome, now)
        self.router.gateway.close(self._mailbox)

    def hang_up(self, now: float) -> None:
        if self.is_open:
            self.read(now)
        if self.is_open:
            self.close("hung up", now)

    def _over(self, outcome: str, now: float) -> None:
        self.outcome, self.ended_at = outcome, now
