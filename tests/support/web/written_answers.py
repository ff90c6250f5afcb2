"""Answers as an endpoint's writer writes them, streamed and whole, and what an SDK makes of the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import anthropic
import httpx2
import openai
from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent

from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import AnswerForm, GenerationPlan, PromptJob, ShowOptions, UsageShown
from router.api.answer.prompts import Prompts
from router.api.answer.writer import AnswerFacts, Counts, Writer
from router.text.hashlm import HashTokenizer
from router.tools.answer import AnswerReader
from router.tools.calls.formats import BY_NAME
from router.tools.reasoning import Thought
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from tests.support.bodies.tool_cases import TOOLS

COUNTS = Counts(prompt=10, answer=5, cached=4, reasoning=2)


def facts_of(form: AnswerForm | None = None) -> AnswerFacts:
    form = form or AnswerForm(BY_NAME["hermes"], TOOLS, request_id="r")
    show = ShowOptions((), True, UsageShown.NEVER, return_token_ids=False, num_logprobs=-1, form=form)
    plan = GenerationPlan("m", (PromptJob([1], 0, ""),), 1, SamplingParams(max_tokens=5), show)
    tokenizer = HashTokenizer()
    return AnswerFacts("t0", 1, plan, Prompts(plan, tokenizer), tokenizer, lambda: COUNTS)


def deltas_of(
    pieces: Iterable[str],
    name: str = "hermes",
    reason: FinishReason = FinishReason.STOP,
    thought: Thought | None = None,
    stopped_by: str = "",
) -> list[Delta]:
    """Return what batches of tokens add, one for each piece of text, and the end."""
    reader = AnswerReader(BY_NAME[name], TOOLS, thought)
    deltas = [Delta(parts=reader.feed(piece)) for piece in pieces]
    is_cut = reason is FinishReason.LENGTH
    last = Delta(parts=reader.finish(is_cut=is_cut), finish_reason=reason, stopped_by=stopped_by)
    last.has_calls = reader.num_calls > 0 and not reader.is_in_call
    return [*deltas, last]


def streamed(writer: Writer, deltas: Sequence[Delta]) -> bytes:
    return writer.opening() + b"".join(writer.more({0: delta}) for delta in deltas) + writer.ending()


def whole(writer: Writer, deltas: Sequence[Delta]) -> bytes:
    total = Delta()
    for delta in deltas:
        total.add(delta)
    return writer.whole([total])


class Canned(httpx2.BaseTransport):
    """Answers every request with the same bytes."""

    def __init__(self) -> None:
        self.data = b""
        self.kind = ""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": self.kind}, content=self.data, request=request)

    def serve(self, data: bytes, *, is_stream: bool) -> None:
        self.data, self.kind = data, "text/event-stream" if is_stream else "application/json"


CANNED = Canned()
ANTHROPIC = anthropic.Anthropic(api_key="k", http_client=httpx2.Client(transport=CANNED), max_retries=0)
OPENAI = openai.OpenAI(api_key="k", http_client=httpx2.Client(transport=CANNED), max_retries=0)


def anthropic_reads(data: bytes, *, is_stream: bool = False) -> anthropic.types.Message:
    CANNED.serve(data, is_stream=is_stream)
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "hi"}]
    if not is_stream:
        return ANTHROPIC.messages.create(model="m", max_tokens=5, messages=messages)
    with ANTHROPIC.messages.stream(model="m", max_tokens=5, messages=messages) as stream:
        return stream.get_final_message()


def openai_reads(data: bytes, *, is_stream: bool = False) -> openai.types.responses.Response:
    CANNED.serve(data, is_stream=is_stream)
    if not is_stream:
        return OPENAI.responses.create(model="m", input="hi")
    *_, last = OPENAI.responses.create(model="m", input="hi", stream=True)  # its `stream` takes no incomplete ones
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    return last.response


def chunks_read(data: bytes) -> list[openai.types.Completion]:
    """What a stream's events are to the SDK."""
    CANNED.serve(data, is_stream=True)
    return list(OPENAI.completions.create(model="m", prompt="hi", stream=True))
