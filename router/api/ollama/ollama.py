"""Ollama's POST /api/chat and POST /api/generate.

A request without messages or without a prompt asks for the model to be loaded. It is planned as a prompt of one token
whose answer is hidden, so it succeeds as soon as a node answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.answer.writer import AnswerFacts, Writer
from router.api.ask.resolve import Cap, Resolver
from router.api.fields.fields import (
    NOT_YET,
    Body,
    CacheSalt,
    FieldTable,
    GenerationFields,
    JsonSchemaFormat,
    MinP,
    Penalty,
    RefusedField,
    RepetitionPenalty,
    ResponseFormat,
    Schema,
    ShortText,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
    sampling_fields_of,
)
from router.api.ollama.ollama_writer import Loading, OllamaWriter, chat_part, generate_part
from router.api.openai.chat_messages import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    ToolCall,
    Turn,
    thinking_kwargs,
    turns_of,
)
from router.api.openai.chat_task import ChatTask, named_as, plan_of
from router.text.chat.conversation import Conversation, Scalar
from router.tools.schemas.choice import parse_tool_choice
from router.tools.schemas.declared import parse_tools, skipped_tools
from shared.core.errors import InvalidRequest, ModelNotFound

LATEST = ":latest"  # the tag of a name without a tag
FUNCTIONS = ("function",)
IMAGE = "image"  # the type of a content part that stands for a message's image
OWN_NAMES = {
    "temperature": "options.temperature",
    "seed": "options.seed",
    "stop": "options.stop",
    "max_tokens": "options.num_predict",
    "response_format": "format",
}


class Options(Body, frozen=True, kw_only=True):
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None


class OllamaFields(Body, frozen=True, kw_only=True):
    """The fields that both paths share."""

    model: str | None = None
    stream: bool = True
    options: Options | None = None
    format: Literal["", "json"] | Schema | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    cache_salt: CacheSalt | None = None
    request_id: ShortText | None = None


class OllamaFunction(Body, frozen=True, kw_only=True):
    name: str
    arguments: Any = ""
    index: Any = None


class OllamaCall(Body, frozen=True, kw_only=True):
    function: OllamaFunction
    id: ShortText | None = None
    type: Any = None


class OllamaMessage(Body, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: ShortText | None = None
    tool_call_id: ShortText | None = None


class OllamaChatRequest(OllamaFields, frozen=True, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaFields, frozen=True, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


ABOUT = {
    "model": "the served model or one of its adapters, with or without the tag `latest`; default: the model",
    "stream": "lines of JSON, the default; false: one answer",
    "options": "`temperature`, `top_p`, `top_k`, `min_p`, `repeat_penalty`, `presence_penalty`, `frequency_penalty`, "
    "`seed` (negative: drawn), `stop`, and `num_predict`, the longest answer, cut to the rest of the context (0 or "
    "less: all of it)",
    "format": "`json`, or a JSON schema that the answer follows",
    "think": "the variable enable_thinking of the model's template; a level is its variable reasoning_effort too",
    "keep_alive": "models stay loaded; a request without a prompt and with 0 is answered as if the model were unloaded",
    "logprobs": "the log-probability of every token",
    "top_logprobs": "and of this many of the likeliest tokens, if `logprobs` is true",
    "cache_salt": "beyond Ollama's: only requests with the same salt share cached prompts",
    "request_id": "beyond Ollama's: returned as X-Request-Id, and named in the router's log",
}
NODES = "it is a setting of the nodes"
IGNORED = {
    "shift": "an answer ends at the end of the context",
    "truncate": "a prompt that is too long is refused",
    "options.main_gpu": NODES,
    "options.num_batch": NODES,
    "options.num_ctx": "it is a setting of the nodes; /api/show has the length of the context",
    "options.num_gpu": NODES,
    "options.num_keep": "conversations are never shortened",
    "options.num_thread": NODES,
    "options.repeat_last_n": "penalties count the whole prompt and answer",
    "options.use_mmap": NODES,
}
REFUSED = {
    "template": RefusedField("templates are taken from the model only"),
    "_debug_render_only": RefusedField(NOT_YET),
}
TEXT_ONLY = RefusedField("this model writes text only")
OLLAMA_CHAT = FieldTable(
    "/api/chat",
    OllamaChatRequest,
    about=ABOUT
    | {
        "messages": "the conversation, with tool calls and their results; without messages: ask for the model to load",
        "tools": "functions that the model may call; what it calls follows the function's schema",
    },
    ignored=IGNORED,
    refused=REFUSED,
    has_event_ids=False,
)
OLLAMA_GENERATE = FieldTable(
    "/api/generate",
    OllamaGenerateRequest,
    about=ABOUT
    | {
        "prompt": "what the user says; without a prompt: ask for the model to load",
        "system": "text before the prompt",
        "raw": "the prompt is not put into the model's template",
    },
    ignored=IGNORED,
    refused=REFUSED
    | {
        "context": RefusedField("send the conversation to /api/chat"),
        "images": RefusedField("this model reads text only"),
        "suffix": RefusedField("the served models can't fill in the middle"),
        "width": TEXT_ONLY,
        "height": TEXT_ONLY,
        "steps": TEXT_ONLY,
    },
    has_event_ids=False,
)


class OllamaChat:
    """See `router.api.ask.generation_api.GenerationApi`."""

    table = OLLAMA_CHAT

    def plan(self, body: OllamaChatRequest, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        if not body.messages:
            return load_plan(body, resolver)
        tools, parts = parse_tools(body.tools).tools, resolver.parts()
        conversation = Conversation(
            turns_of([message_of(message) for message in body.messages], parts),
            tools=[tool.for_template() for tool in tools] or None,
            kwargs=kwargs_of(body),
        )
        task = ChatTask(
            conversation,
            parse_tool_choice(None, tools),
            max_tokens=num_predict(body),
            max_tokens_field="num_predict",
            num_logprobs=num_logprobs(body),
            parts=parts,
        )
        with named_as(OWN_NAMES):
            return plan_of(task, fields_of(body, resolver), resolver, contexts)

    def skipped(self, body: OllamaChatRequest) -> Sequence[str]:
        return skipped_tools(body.tools, FUNCTIONS)

    def writer(self, body: OllamaChatRequest, facts: AnswerFacts) -> Writer:
        return OllamaWriter(facts, chat_part, body.model, loading=None if body.messages else loading_of(body))


class OllamaGenerate:
    """See `router.api.ask.generation_api.GenerationApi`."""

    table = OLLAMA_GENERATE

    def plan(self, body: OllamaGenerateRequest, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        if not body.prompt:
            return load_plan(body, resolver)
        with named_as(OWN_NAMES | {"messages": "prompt"}):
            if body.raw:
                return raw_plan(body, body.prompt, resolver, contexts)
            turns: list[Turn] = [{"role": "system", "content": body.system}] if body.system else []
            turns.append({"role": "user", "content": body.prompt})
            task = ChatTask(
                Conversation(turns, kwargs=kwargs_of(body)),
                max_tokens=num_predict(body),
                max_tokens_field="num_predict",
                num_logprobs=num_logprobs(body),
            )
            return plan_of(task, fields_of(body, resolver), resolver, contexts)

    def skipped(self, body: OllamaGenerateRequest) -> Sequence[str]:
        return ()

    def writer(self, body: OllamaGenerateRequest, facts: AnswerFacts) -> Writer:
        return OllamaWriter(facts, generate_part, body.model, loading=None if body.prompt else loading_of(body))


def raw_plan(body: OllamaGenerateRequest, prompt: str, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
    if body.system:
        raise InvalidRequest("system: a raw prompt is not put into a template", param="system")
    fields = fields_of(body, resolver)
    resolver.check_shared(fields)
    ids = resolver.prompt_ids(prompt, add_special=True)
    resolver.check_length(ids, "prompt", contexts.largest)
    room = contexts.largest - resolver.size(ids)
    cap = resolver.cap(num_predict(body), "num_predict", room, default=room)
    grammar, free = resolver.form(fields)
    return resolver.plan(fields, [(ids, "")], cap, num_logprobs(body), grammar=grammar, unenforced=free)


def load_plan(body: OllamaFields, resolver: Resolver) -> GenerationPlan:
    """The answer is never streamed: clients read it as one object, even where they did not ask for that."""
    fields = GenerationFields(model=served_name(body.model, resolver), request_id=body.request_id)
    resolver.check_shared(fields)
    return resolver.plan(fields, [(resolver.prompt_ids(" ", add_special=False), "")], Cap(0), -1)


def loading_of(body: OllamaFields) -> Loading:
    return Loading.UNLOAD if body.keep_alive in (0, "0") else Loading.LOAD


def fields_of(body: OllamaFields, resolver: Resolver) -> GenerationFields:
    options = body.options or Options()
    return GenerationFields(
        model=served_name(body.model, resolver),
        stream=body.stream,
        **sampling_fields_of(options) | {"repetition_penalty": options.repeat_penalty},
        seed=None if options.seed is None or options.seed < 0 else options.seed,
        stop=options.stop,
        response_format=format_of(body.format),
        cache_salt=body.cache_salt,
        request_id=body.request_id,
    )


def served_name(name: str | None, resolver: Resolver) -> str | None:
    """Return the name without the tag `latest`, unless it is served under this tag."""
    if name is None or not name.endswith(LATEST):
        return name
    try:
        resolver.check_model(name)
    except ModelNotFound:
        return name.removesuffix(LATEST)
    return name


def num_predict(body: OllamaFields) -> int | None:
    wanted = body.options.num_predict if body.options is not None else None
    return wanted if wanted is not None and wanted > 0 else None


def num_logprobs(body: OllamaFields) -> int:
    return (body.top_logprobs or 0) if body.logprobs else -1


def kwargs_of(body: OllamaFields) -> Mapping[str, Scalar]:
    if isinstance(body.think, str):
        return thinking_kwargs(body.think, is_on=True)
    return thinking_kwargs(None, body.think)


def format_of(wanted: str | Schema | None) -> ResponseFormat | None:
    if not wanted and not isinstance(wanted, dict):
        return None
    if isinstance(wanted, dict):
        return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=wanted))
    return ResponseFormat(type="json_object")


def message_of(message: OllamaMessage) -> ChatMessage:
    """An image becomes a part of the content, so that it meets the same rules as at other endpoints."""
    images = [ContentPart(type=IMAGE) for _ in message.images or ()]
    return ChatMessage(
        role=message.role,
        content=[ContentPart(text=message.content), *images] if images else message.content,
        reasoning_content=message.thinking,
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
        tool_calls=[call_of(call) for call in message.tool_calls or ()] or None,
    )


def call_of(call: OllamaCall) -> ToolCall:
    return ToolCall(id=call.id, function=CalledFunction(name=call.function.name, arguments=call.function.arguments))
