"""Answer one generation request, streamed or whole.

plan -> gateway.open -> mailbox ... news -> Choices -> MarkedEvents -> one write per batch of news
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from router.api.answer.answer_span import AnswerSpan
from router.api.answer.certifying import Certifying
from router.api.answer.choice_text import Delta
from router.api.answer.choices import Choices, Step
from router.api.answer.generation_plan import GenerationPlan
from router.api.answer.marked_events import MarkedEvents
from router.api.answer.stream_start import StreamStart
from router.api.answer.writer import AnswerFacts, Writer
from router.api.ask.unenforced import free_header
from router.certify.signing import AnswerSigner
from router.dispatch.gateway import Gateway
from router.http.connection import Connection
from router.http.errors import ClientGone, internal_error
from router.requests.answered import Answered, AnswerKind
from router.requests.effects import News
from router.requests.journey import UNTRACED
from router.requests.mailbox import Mailbox
from router.requests.new_request import NewRequest
from router.tenants.tenant import EVERYBODY, Tenant
from router.text.chat.interface import Tokenizer
from shared.core.errors import BatonError, DeadlineExceeded, InvalidRequest
from shared.core.states import FinishReason
from shared.observe.metrics import RequestMetrics

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


def session_of(connection: Connection) -> str:
    """Return the client's session id, or "". Requests of one session share nodes."""
    given = connection.header(b"x-session-id") or connection.header(b"x-correlation-id") or ""
    return given[:MAX_SESSION_CHARS]


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
    """Owned by its request's task."""

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
        self._choices = choices = Choices(plan, tokenizer, gateway, metrics, arrived)
        self._begun: Collection[str] = ()  # rids
        self._is_our_failure = False
        self._ended_as: str = FinishReason.ABORT
        token, created = (start.name, start.created) if start else (secrets.token_hex(ID_BYTES), int(time.time()))
        facts = AnswerFacts(token, created, plan, choices.prompts, tokenizer, choices.counts, choices.times)
        self._writer = make_writer(facts)
        if signer is not None and plan.is_certified:
            choices.certifying = Certifying(plan, self._writer.answer_id, signer)
        self._events = MarkedEvents(self._writer, start, len(choices.texts), metrics)
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
        self._choices.follow(mailbox)
        self._begun = mailbox.begun
        self._metrics.started()
        self._metrics.for_model(self._plan.model)
        return asker, mailbox

    def _end_span(self) -> None:
        if self._span is not None:
            own = self._choices
            self._span.over(self._writer.answer_id, self._ended_as, own.reasons, own.counts(), own.times)

    def _answered(self, job: int, rid: str, asker: Asker) -> Answered:
        num = self._plan.num_sequences
        has_calls = any(choice.has_calls for choice in self._choices.texts[job * num : (job + 1) * num])
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
        if not self._choices.have_begun:
            begun = () if self._is_our_failure else self._begun
            return self._choices.num_prompt_tokens(begun)
        counts = self._choices.counts()
        return counts.prompt + counts.answer

    async def _whole(self, connection: Connection, mailbox: Mailbox) -> None:
        totals = [Delta() for _ in self._choices.texts]
        while self._choices.num_open:
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
        while not self._choices.prompts.are_scored:
            steps += self._absorb(await self._next(connection, mailbox))
        is_long = self._plan.show.echoes_logprobs
        data = await asyncio.to_thread(self._writer.opening) if is_long else self._writer.opening()
        data = self._events.marked(data) + self._events.more(steps)
        if connection.status is None and not self._events.is_behind:
            await connection.start(200, self._writer.headers)
        while self._choices.num_open:
            if data:
                await self._say(connection, data)
            data = self._events.more(self._absorb(await self._next(connection, mailbox)))
        await self._say(connection, data + self._events.ending(), last=True)

    async def _say(self, connection: Connection, data: bytes, *, last: bool = False) -> None:
        if connection.status is None:
            await connection.start(200, self._writer.headers)
        await connection.write(data, last=last)

    async def _next(self, connection: Connection, mailbox: Mailbox) -> Sequence[News]:
        """Send pings before the first tokens, and while a resumed stream catches up."""
        while self._choices.num_waiting or self._events.is_behind:
            news = await news_within(PING_S, mailbox)
            if news is not None:
                return news
            await self._say(connection, self._events.ping)
        return await mailbox.take_news()

    def _absorb(self, batch: Sequence[News]) -> list[Step]:
        return self._choices.absorb(batch, each_token=self._events.is_behind)

    def _outcome(self) -> FinishReason:
        return FinishReason.LENGTH if FinishReason.LENGTH in self._choices.reasons else FinishReason.STOP
