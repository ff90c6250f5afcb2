"""Streams without sockets, nodes or time: news in any batches, cut behind any event, and gone on with elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from router.api.answer.generation_plan import PLAIN, AnswerForm, GenerationPlan, PromptJob, ShowOptions, UsageShown
from router.api.answer.stream_start import begin_stream
from router.api.answer.stream_token import Signer
from router.api.answer.writer import AnswerFacts, Writer
from router.api.anthropic.messages_writer import MessagesWriter
from router.api.fields.fields import GenerationFields
from router.api.openai.chat import ChatShape
from router.api.openai.choices_writer import ChoicesWriter
from router.api.openai.completions import CompletionShape
from router.api.openai.responses_writer import ResponsesWriter
from router.api.site.generation import Generation
from router.requests.effects import News, Update
from router.requests.mailbox import Mailbox
from router.requests.new_request import NewRequest
from router.tenants.tenant import EVERYBODY
from router.text.hashlm import HashTokenizer
from router.tools.calls.formats import BY_NAME
from router.tools.reasoning import THINK, Thought
from shared.core.sampling_params import SamplingParams
from shared.observe.metrics import RequestMetrics
from shared.wire.messages import Key, SequenceEnd
from tests.support.bodies.tool_cases import TOOLS

MIXED = AnswerForm(BY_NAME["hermes"], TOOLS, thought=Thought(THINK, is_open=True))
WRITERS: dict[str, Callable[[AnswerFacts], Writer]] = {
    "chat": lambda facts: ChoicesWriter(ChatShape(facts.tokenizer, facts.plan.show), facts),
    "completions": lambda facts: ChoicesWriter(CompletionShape(facts.tokenizer, facts.plan.show), facts),
    "messages": MessagesWriter,
    "responses": lambda facts: ResponsesWriter(facts, {}),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. `texts`: what the nodes say for each choice; `stops`: stop strings."""

    api: str
    texts: tuple[str, ...]
    is_mixed: bool = False  # thoughts and calls beside content
    stops: tuple[str, ...] = ()
    prompt: tuple[int, ...] = (1, 2)
    seed: int | None = None

    def plan(self) -> GenerationPlan:
        form = MIXED if self.is_mixed else PLAIN
        usage = UsageShown.LAST if self.api in ("chat", "completions") else UsageShown.NEVER
        show = ShowOptions(self.stops, True, usage, return_token_ids=False, num_logprobs=-1, form=form)
        sampling = SamplingParams(max_tokens=10_000)
        return GenerationPlan("m", (PromptJob(list(self.prompt), 77, ""),), len(self.texts), sampling, show)

    def body(self) -> GenerationFields:
        return GenerationFields(stream=True, seed=self.seed)


class Nodes:
    """A gateway that says the given batches, and keeps what was asked for."""

    def __init__(self, batches: Sequence[Sequence[News]]) -> None:
        self._batches = batches
        self.asked: list[NewRequest] = []

    def open(self, requests: Sequence[NewRequest], answer_id: str) -> Mailbox:
        self.asked += requests
        mailbox = Batches(answer_id)
        mailbox.rids, mailbox.batches = ["r"], list(self._batches)
        return mailbox

    def close(self, mailbox: Mailbox) -> None:
        pass

    def close_sequence(self, rid: str, seq_index: int) -> None:
        pass


class Batches(Mailbox):
    """Hands over one batch at a time."""

    batches: list[Sequence[News]]

    async def take_news(self) -> list[News]:
        return list(self.batches.pop(0))


class Reader:
    """The client's end of one connection."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.failure: Exception | None = None
        self.was_admitted = False
        self.tenant = EVERYBODY
        self.trace = ""
        self.data = b""

    def header(self, name: bytes) -> str | None:
        """Return None: this client sends no headers."""
        return None

    async def start(self, status: int, headers: object) -> None:
        self.status = status

    async def write(self, data: bytes, *, last: bool = False) -> None:
        self.data += data

    @property
    def events(self) -> list[Event]:
        return [Event(text) for text in self.data.decode().split("\n\n")[:-1]]


class Event:
    def __init__(self, text: str) -> None:
        fields = dict(line.split(": ", 1) for line in text.split("\n"))
        self.id, self.name, self.raw = fields.get("id", ""), fields.get("event", ""), fields["data"]

    @property
    def data(self) -> Any:
        return msgspec.json.decode(self.raw)


def batched(asked: Asked, sizes: Sequence[int]) -> list[list[News]]:
    """Return what the nodes say, in runs of these lengths, over and over; ends come with last tokens or behind them."""
    batches: list[list[News]] = []
    tokenizer, places, turn = HashTokenizer(), [0] * len(asked.texts), 0
    while any(place <= len(text) for place, text in zip(places, asked.texts, strict=True)):
        batch: list[News] = []
        for index, text in enumerate(asked.texts):
            size, start = sizes[turn % len(sizes)], places[index]
            turn += 1
            if start > len(text):
                continue
            ids = tokenizer.encode(text[start : start + size], add_special=False)
            is_last = start + size > len(text)
            end = SequenceEnd(Key("r", 1, "r", 0, index), "stop", len(text), 1, "", "") if is_last else None
            places[index] = len(text) + 1 if is_last else start + size
            batch.append(Update("r", index, ids, (), end))
        batches.append(batch)
    return batches


def read(
    asked: Asked,
    sizes: Sequence[int],
    signer: Signer,
    last_event_id: str | None = None,
    metrics: RequestMetrics | None = None,
) -> Reader:
    """Return what one connection brings. Raise what is answered instead of a stream."""
    plan, start = begin_stream(f"/v1/{asked.api}", asked.body(), asked.plan(), signer, last_event_id)
    reader, nodes = Reader(), Nodes(batched(asked, sizes))
    metrics = metrics or RequestMetrics(CollectorRegistry())
    generation = Generation(plan, WRITERS[asked.api], HashTokenizer(), nodes, metrics, 0.0, start)  # type: ignore[arg-type]
    asyncio.run(generation.run(reader))  # type: ignore[arg-type]
    return reader


def last_id(events: Sequence[Event]) -> str:
    """Return what a client sends that saw these events: the token of the first id, and the last id."""
    token = events[0].id.partition("/")[0]
    return f"{token}/{events[-1].id.rpartition('/')[2]}"
