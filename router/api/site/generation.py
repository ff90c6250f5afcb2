"""Answer one generation request, streamed or whole. `_absorb` and `Writer.more` run for every token.

plan -> gateway.open -> mailbox ... news -> ChoiceText -> Writer -> one write per batch of news
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from router.api.answer.answer_span import AnswerSpan
from router.api.answer.certifying import Certifying
from router.api.answer.choice_text import ChoiceText, Delta
from router.api.answer.generation_plan import GenerationPlan
from router.api.answer.marks import Marks
from router.api.answer.prompts import Prompts
from router.api.answer.stream_start import StreamStart
from router.api.answer.writer import AnswerFacts, Counts, Times, Writer, ping_among_ids
from router.api.ask.unenforced import free_header
from router.certify.signing import AnswerSigner
from router.dispatch.gateway import Gateway
from router.http.connection import Connection
from router.http.errors import ClientGone, internal_error
from router.requests.answered import Answered, AnswerKind
from router.requests.effects import Failure, News, ScoredPrompt, Update
from router.requests.journey import UNTRACED
from router.requests.mailbox import Mailbox
from router.requests.new_request import NewRequest
from router.tenants.tenant import EVERYBODY, Tenant
from router.text.chat.interface import Tokenizer
from shared.core.errors import BatonError, DeadlineExceeded, InvalidRequest
from shared.core.states import FinishReason
from shared.observe.metrics import RequestMetrics
from shared.wire.messages import Fingerprint

PING_S = 3.0  # because proxies and clients close silent connections
MAX_SESSION_CHARS = 256
DEADLINE = b"x-envoy-expected-rq-timeout-ms"
MAX_DEADLINE_DIGITS = 12
ID_BYTES = 12


async def news_within(seconds: float, mailbox: Mailbox) -> Sequence[News] | None:
    """None after `seconds` without news."""
    try:
        async with asyncio.timeout(seconds):
            return await mailbox.take_news()
    except TimeoutError:
        return None


Step = tuple[int, Delta]  # (choice index, what to add to the choice)


def add_delta(deltas: dict[int, Delta], index: int, delta: Delta) -> None:
    if index in deltas:
        deltas[index].add(delta)
    else:
        deltas[index] = delta


def one_by_one(update: Update) -> Iterator[Update]:
    for place, token in enumerate(update.ids):
        yield Update(update.rid, update.seq_index, (token,), update.logprobs[place : place + 1], None)
    if update.end is not None:
        yield Update(update.rid, update.seq_index, (), (), update.end)


def session_of(connection: Connection) -> str:
    """Return the client's session id, or "". Requests of one session share nodes."""
    given = connection.header(b"x-session-id") or connection.header(b"x-correlation-id") or ""
    return given[:MAX_SESSION_CHARS]


def count_tokens(plan: GenerationPlan, choices: Sequence[ChoiceText], cached: Sequence[int]) -> Counts:
    """Return a request's counts so far. `cached`: the cached tokens of each prompt."""
    thinks = plan.show.form.thinks
    return Counts(
        prompt=sum(len(job.ids) for job in plan.jobs),
        answer=sum(choice.num_tokens for choice in choices),
        cached=sum(cached),
        reasoning=sum(choice.num_reasoning for choice in choices) if thinks else None,
    )


@dataclass(frozen=True, slots=True)
class Asker:
    affinity: str = ""  # its session, or what it sends as prompt_cache_key
    has_session: bool = False
    tenant: Tenant = EVERYBODY
    within_s: float | None = None  # the client's limit for the whole answer
    trace: str = ""


def time_left(connection: Connection, arrived: float) -> float | None:
    """Return the seconds until the deadline in Envoy's header, if any. Raise InvalidRequest for an invalid header."""
    given = connection.header(DEADLINE)
    if given is None or given.strip() == "0":  # 0: no deadline
        return None
    if not given.strip().isdecimal() or len(given) > MAX_DEADLINE_DIGITS:
        raise InvalidRequest(f"the header {DEADLINE.decode()} must be a number of milliseconds")
    return int(given) / 1000 - (time.monotonic() - arrived)


class Generation:
    """Owned by its request's task. Choice index = prompt * n + sequence.

    It has many fields because it alone sees all choices of a request.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        make_writer: Callable[[AnswerFacts], Writer],
        tokenizer: Tokenizer,
        gateway: Gateway,
        metrics: RequestMetrics,
        arrived: float,
        start: StreamStart | None = None,
        signer: AnswerSigner | None = None,
        span: AnswerSpan | None = None,
    ) -> None:
        """`start`: set if the stream's events have ids. `signer`: of certificates, which only some plans ask for.
        `span`: set if the request is traced."""
        self._plan = plan
        self._start_ids = list(tokenizer.facts.start_ids)
        self._gateway = gateway
        self._metrics = metrics
        self._span = span
        self._arrived = arrived
        self._times = Times(arrived, arrived, arrived)
        num_choices = len(plan.jobs) * plan.num_sequences
        self._choices = [
            ChoiceText(tokenizer, plan.sampling, plan.show, len(job.echo))
            for job in plan.jobs
            for _ in range(plan.num_sequences)
        ]
        self._last_token_at = [0.0] * num_choices
        self._cached = [0] * len(plan.jobs)
        self._job_of: dict[str, int] = {}
        self._begun: Collection[str] = ()  # rids
        self._nodes: Mapping[str, Collection[Fingerprint]] = {}  # by rid, see Mailbox
        self._is_our_failure = False
        self._ended_as: str = FinishReason.ABORT
        self._num_open = num_choices
        self._num_waiting = num_choices  # choices that wait for their first token
        self._prompts = Prompts(plan, tokenizer)
        token, created = (start.name, start.created) if start else (secrets.token_hex(ID_BYTES), int(time.time()))
        self._counts = partial(count_tokens, plan, self._choices, self._cached)  # a method would refer to `self`
        facts = AnswerFacts(token, created, plan, self._prompts, tokenizer, self._counts, self._times)
        self._writer = make_writer(facts)
        self._certifying: Certifying | None = None
        if signer is not None and plan.is_certified:
            self._certifying = Certifying(plan, self._writer.answer_id, signer)
        self._marks = start.marks(num_choices) if start is not None else None
        self._ping = self._writer.ping if start is None else ping_among_ids(self._writer.ping)
        self._held: dict[int, Delta] = {}  # deltas of choices that wait until other choices catch up
        self._is_behind = start is not None and start.seen is not None
        self.was_admitted = False

    async def run(self, connection: Connection) -> None:
        """Send the answer. Raise errors before the headers; write a later error into the stream."""
        try:
            asker, mailbox = self._begin(connection)
        except Exception as error:
            self._ended_as = error.code if isinstance(error, BatonError) else BatonError.code
            self._end_span()
            raise
        connection.was_admitted = self.was_admitted = True
        try:
            if self._plan.show.stream:
                await self._stream(connection, mailbox)
            else:
                await self._whole(connection, mailbox)
            self._ended_as = self._outcome()
            mailbox.answered = [self._answered(job, rid, asker) for job, rid in enumerate(mailbox.rids)]
        except BatonError as error:
            self._ended_as = error.code
            self._is_our_failure = not (isinstance(error, DeadlineExceeded) and asker.within_s is not None)
            if connection.status is None:
                raise
            connection.failure = error.with_traceback(None)  # breaks the cycle of error, frames and connection
            await connection.write(self._writer.failed(error), last=True)
        except ClientGone:
            raise
        except Exception:
            self._ended_as = BatonError.code
            self._is_our_failure = True
            if connection.status is not None:
                await connection.write(self._writer.failed(internal_error()), last=True)
            raise
        finally:
            self._gateway.close(mailbox)
            self._metrics.ended(self._ended_as, time.monotonic() - self._arrived)
            self._end_span()

    def _begin(self, connection: Connection) -> tuple[Asker, Mailbox]:
        session, left = session_of(connection), time_left(connection, self._arrived)
        trace = connection.trace if self._span is None else self._span.traceparent
        asker = Asker(session or self._plan.session, bool(session), connection.tenant, left, trace)
        requests = [self._new_request(job, asker) for job in range(len(self._plan.jobs))]
        mailbox = self._gateway.open(requests, self._writer.answer_id)
        self._job_of = {rid: job for job, rid in enumerate(mailbox.rids)}
        self._begun, self._nodes = mailbox.begun, mailbox.nodes
        self._metrics.started()
        self._metrics.for_model(self._plan.model)
        return asker, mailbox

    def _end_span(self) -> None:
        if self._span is not None:
            reasons = [choice.finish_reason for choice in self._choices if choice.finish_reason is not None]
            self._span.over(self._writer.answer_id, self._ended_as, reasons, self._counts(), self._times)

    def _answered(self, job: int, rid: str, asker: Asker) -> Answered:
        num = self._plan.num_sequences
        has_calls = any(choice.has_calls for choice in self._choices[job * num : (job + 1) * num])
        without = AnswerKind.AFTER_TOOLS if self._plan.show.form.tools else AnswerKind.PLAIN
        kind = AnswerKind.CALLS if has_calls else without
        return Answered(rid, kind, asker.affinity, self._plan.keep_s, asker.has_session)

    def _new_request(self, job: int, asker: Asker) -> NewRequest:
        """Append the decoder's start tokens, which are neither shown nor counted."""
        own = self._plan.jobs[job]
        ids = own.ids + self._start_ids
        plan = self._plan
        return NewRequest(
            ids,
            plan.num_sequences,
            plan.sampling,
            own.seed,
            plan.adapter,
            plan.cache_salt,
            asker.affinity,
            asker.tenant,
            asker.within_s,
            plan.rank,
            asker.trace,
            UNTRACED if self._span is None else self._span.begin_journey(),
        )

    @property
    def num_used(self) -> int:
        """The tokens to pay for. Before the first token: those of begun prompts, or 0 if the cluster failed."""
        if self._num_waiting == len(self._choices):
            begun = () if self._is_our_failure else self._begun
            return sum(len(self._plan.jobs[self._job_of[rid]].ids) for rid in begun)
        counts = self._counts()
        return counts.prompt + counts.answer

    async def _whole(self, connection: Connection, mailbox: Mailbox) -> None:
        totals = [Delta() for _ in self._choices]
        while self._num_open:
            for index, delta in self._absorb(await mailbox.take_news()):
                totals[index].add(delta)
        is_long = self._plan.sampling.prompt_logprobs >= 0  # a long answer is written on a thread
        data = await asyncio.to_thread(self._writer.whole, totals) if is_long else self._writer.whole(totals)
        connection.more_headers.update(free_header(self._plan.unenforced, totals))
        await connection.answer(200, data)

    async def _stream(self, connection: Connection, mailbox: Mailbox) -> None:
        """Send headers with the first news or ping, so that an immediate failure gets its own HTTP status.

        A resumed stream sends headers once it has caught up, or with its first ping.
        """
        steps = self._absorb(await self._next(connection, mailbox))
        while not self._prompts.are_scored:
            steps += self._absorb(await self._next(connection, mailbox))
        is_long = self._plan.show.echoes_logprobs
        data = await asyncio.to_thread(self._writer.opening) if is_long else self._writer.opening()
        data = self._marked(data) + self._more(steps)
        if connection.status is None and not self._is_behind:
            await connection.start(200, self._writer.headers)
        while self._num_open:
            if data:
                await self._say(connection, data)
            data = self._more(self._absorb(await self._next(connection, mailbox)))
        if self._marks is not None:
            self._marks.finish()
            self._writer.num_events = self._marks.num_events
        await self._say(connection, data + self._marked(self._writer.ending()), last=True)

    async def _say(self, connection: Connection, data: bytes, *, last: bool = False) -> None:
        if connection.status is None:
            await connection.start(200, self._writer.headers)
        await connection.write(data, last=last)

    def _more(self, steps: Iterable[Step]) -> bytes:
        """Return events with their ids. Raise ResumeMismatch if the reader saw other tokens."""
        marks = self._marks
        if marks is None:
            return b"".join([self._writer.more({index: delta}) for index, delta in steps])
        data = []
        for index, delta in steps:
            if marks.holds(index):
                add_delta(self._held, index, delta)
            else:
                data.append(self._shown(marks, index, delta))
            if self._held and not marks.is_behind:
                held, self._held = self._held, {}
                data += [self._shown(marks, *step) for step in held.items()]
        if self._is_behind and not marks.is_behind:
            self._is_behind = False
            self._metrics.continued(marks.num_recomputed)
        return b"".join(data)

    def _shown(self, marks: Marks, index: int, delta: Delta) -> bytes:
        self._writer.num_events = marks.num_events
        return marks.stamp(self._writer.more({index: delta}), index, delta)

    def _marked(self, data: bytes) -> bytes:
        return data if self._marks is None else self._marks.stamp(data)

    async def _next(self, connection: Connection, mailbox: Mailbox) -> Sequence[News]:
        """Send pings before the first tokens, and while a resumed stream catches up."""
        while self._num_waiting or self._is_behind:
            news = await news_within(PING_S, mailbox)
            if news is not None:
                return news
            await self._say(connection, self._ping)
        return await mailbox.take_news()

    def _absorb(self, batch: Sequence[News]) -> list[Step]:
        """Raise a failed request's error.

        While a resumed stream catches up, each token is a Step of its own.
        """
        now = time.monotonic()
        deltas: dict[int, Delta] = {}
        steps: list[Step] = []
        for news in batch:
            if isinstance(news, Failure):
                raise news.error
            if isinstance(news, ScoredPrompt):
                self._prompts.add_scores(self._job_of[news.rid], news.logprobs)
                continue
            index = self._job_of[news.rid] * self._plan.num_sequences + news.seq_index
            if self._choices[index].finish_reason is not None:
                continue
            if news.ids:
                self._observe(index, len(news.ids), now)
            if news.end is not None:
                self._note_cached(news.rid, news.end.cached_tokens)
            if self._is_behind:
                own = self._choices[index]
                steps += [(index, self._advance(index, one)) for one in one_by_one(news) if own.finish_reason is None]
            else:
                add_delta(deltas, index, self._advance(index, news))
        return steps or list(deltas.items())

    def _advance(self, index: int, update: Update) -> Delta:
        choice = self._choices[index]
        delta = Delta() if self._plan.show.hides_answer else choice.feed(update.ids, update.logprobs)
        if update.end is not None and choice.finish_reason is None:
            reason = FinishReason.LENGTH if self._plan.show.hides_answer else FinishReason(update.end.reason)
            delta.add(choice.finish(reason))
        if self._certifying is not None:
            self._certifying.take_delta(index, delta, self._nodes[update.rid])
        if choice.finish_reason is not None:
            self._num_open -= 1
            if update.end is None:
                self._gateway.close_sequence(update.rid, update.seq_index)
        return delta

    def _observe(self, index: int, num_tokens: int, now: float) -> None:
        """The time since the last batch is divided equally among a batch's tokens."""
        if self._num_waiting == len(self._choices):
            self._metrics.first_token(now - self._arrived)
            self._times.first = now
        self._times.last = now
        before = self._last_token_at[index]
        self._num_waiting -= not before
        self._last_token_at[index] = now
        if before:
            for _ in range(num_tokens):
                self._metrics.next_token((now - before) / num_tokens)

    def _note_cached(self, rid: str, cached_tokens: int) -> None:
        job = self._job_of[rid]
        limit = len(self._plan.jobs[job].ids)
        self._cached[job] = max(self._cached[job], min(cached_tokens, limit))

    def _outcome(self) -> FinishReason:
        reasons = {choice.finish_reason for choice in self._choices}
        return FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP
