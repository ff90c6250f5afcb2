"""One row per field of every request schema: what it does, and what is refused with its name. A field that is added
without a row fails here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from router.api.generation_plan import GenerationPlan
from router.api.parse import BodyParser
from router.api.resolve import Resolver
from router.api.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TextPart,
    TokenizeRequest,
)
from router.text.hashlm import hash_text_model
from shared.config.settings import LimitsConfig
from shared.core.errors import InvalidRequest

CONTEXT = 1000
RESOLVER = Resolver("hashlm", hash_text_model(), LimitsConfig(max_n=8, max_stop_strings=4, max_stop_chars=10))
PARSERS = {kind: BodyParser(kind) for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)}
USER = [{"role": "user", "content": "hi"}]
BASES: dict[type, dict[str, Any]] = {
    ChatRequest: {"model": "hashlm", "messages": USER},
    CompletionRequest: {"model": "hashlm", "prompt": "hi"},
    TokenizeRequest: {"prompt": "hi"},
    DetokenizeRequest: {"tokens": [1]},
}
GENERATIONS = (ChatRequest, CompletionRequest)
Check = Callable[[GenerationPlan], object]


@dataclass(frozen=True)
class Row:
    """`good`: (value, what must hold of the plan). `bad`: refused, naming the field. `extra`: fields sent along."""

    field: str
    good: tuple[tuple[Any, Check], ...] = ()
    bad: tuple[Any, ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[type, ...] = GENERATIONS
    param: str = ""


def always(plan: GenerationPlan) -> bool:
    return True


def sampling(name: str, value: Any) -> Check:
    return lambda plan: getattr(plan.sampling, name) == value


def show(name: str, value: Any) -> Check:
    return lambda plan: getattr(plan.show, name) == value


def harmless(*values: Any) -> tuple[tuple[Any, Check], ...]:
    return tuple((value, always) for value in values)


CHAT, COMPLETION = (ChatRequest,), (CompletionRequest,)
BIG = 10**30
SHARED = [
    Row("model", (("hashlm", always),), ("gpt-4", "", None, 3, [])),
    Row("stream", ((True, show("stream", True)), (None, show("stream", False))), ("yes", 1, {})),
    Row(
        "stream_options",
        (({"include_usage": True}, show("include_usage", True)), ({}, show("include_usage", False))),
        (True, "x", []),
        (("stream", True),),
    ),
    Row(
        "n",
        ((3, lambda plan: plan.num_sequences == 3), (None, lambda plan: plan.num_sequences == 1)),
        (0, -1, 9, BIG, 1.5, "2", True),
    ),
    Row("max_tokens", ((7, sampling("max_tokens", 7)),), (0, -1, CONTEXT, BIG, 2.5, "7")),
    Row(
        "temperature",
        ((0, sampling("temperature", 0.0)), (None, sampling("temperature", 1.0)), (2, sampling("temperature", 2.0))),
        (-0.1, 2.1, "1", [], True),
    ),
    Row("top_p", ((0.5, sampling("top_p", 0.5)), (None, sampling("top_p", 1.0))), (0, 1.1, -1, "1")),
    Row("top_k", ((5, sampling("top_k", 5)), (-1, sampling("top_k", 0)), (BIG, sampling("top_k", 96))), (-2, 1.5, "5")),
    Row("min_p", ((0.1, sampling("min_p", 0.1)),), (-0.1, 1.1, "0")),
    Row("presence_penalty", ((-2, sampling("presence_penalty", -2.0)),), (-2.1, 2.1, "1")),
    Row("frequency_penalty", ((2, sampling("frequency_penalty", 2.0)),), (-2.1, 2.1, "1")),
    Row("repetition_penalty", ((1.2, sampling("repetition_penalty", 1.2)),), (0, -1, 11, "1")),
    Row(
        "logit_bias",
        (({"3": -5, "1": 2}, sampling("logit_bias", ((1, 2.0), (3, -5.0)))),),
        (
            {"x": 1},
            {"-1": 1},
            {"96": 1},
            {"1": 101},
            {"1": "x"},
            {"²": 1},
            {"1" * 30: 1},
            [1],
            "x",
            {str(i): 1 for i in range(301)},
        ),
    ),
    Row(
        "seed",
        ((5, lambda plan: plan.jobs[0].seed == 5), (-1, lambda plan: plan.jobs[0].seed == 2**64 - 1)),
        (BIG, -BIG, 1.5, "5"),
    ),
    Row(
        "stop",
        (("a", show("stops", ("a",))), (["a", "b", "a"], show("stops", ("a", "b"))), ([], show("stops", ()))),
        ("", [""], ["a" * 11], ["a", "b", "c", "d", "e"], [1], 5, {}),
    ),
    Row("stop_token_ids", (([3], sampling("stop_token_ids", (95, 3))),), ([96], [-1], list(range(70)), ["a"], 3)),
    Row("ignore_eos", ((True, sampling("stop_token_ids", ())), (False, sampling("stop_token_ids", (95,)))), ("x", 1)),
    Row("min_tokens", ((4, sampling("min_tokens", 4)),), (9, -1, "1", 1.5), (("max_tokens", 8),)),
    Row("return_token_ids", ((True, show("return_token_ids", True)),), ("x", 1)),
    Row("user", harmless("somebody", None), (1, "x" * 513)),
    Row("metadata", harmless({"a": "b"}, None), ("x", {"a": 1})),
    Row("store", harmless(True, False, None), ("x", 1)),
]
CHAT_ROWS = [
    Row(
        "messages",
        ((USER, lambda plan: len(plan.jobs[0].ids) == len("user: hi assistant: ")),),
        ([], "hi", None, [{"role": "user", "content": "é"}], [{"role": "user", "content": "x" * 1000}]),
        kinds=CHAT,
    ),
    Row("max_completion_tokens", ((7, sampling("max_tokens", 7)),), (0, -1, CONTEXT, BIG, "x"), kinds=CHAT),
    Row("max_completion_tokens", (), (8,), (("max_tokens", 7),), kinds=CHAT),
    Row("logprobs", ((True, show("num_logprobs", 0)), (False, show("num_logprobs", -1))), (3, "x"), kinds=CHAT),
    Row(
        "top_logprobs",
        ((3, show("num_logprobs", 3)), (3, sampling("num_logprobs", 3))),
        (21, -1, "x", 1.5),
        (("logprobs", True),),
        kinds=CHAT,
    ),
    Row("top_logprobs", (), (3,), (("logprobs", False),), kinds=CHAT),
    Row("safety_identifier", harmless("x", None), (1,), kinds=CHAT),
    Row("prompt_cache_key", harmless("x", None), (1,), kinds=CHAT),
    Row("tools", harmless(None, []), ([{"type": "function"}], "x"), kinds=CHAT),
    Row("tool_choice", harmless(None, "none", "auto"), ("required", {}), kinds=CHAT),
    Row("parallel_tool_calls", harmless(None, True, False), ("x",), kinds=CHAT),
    Row("functions", harmless(None, []), ([{"name": "f"}],), kinds=CHAT),
    Row("function_call", harmless(None), ("auto", {"name": "f"}), kinds=CHAT),
    Row("response_format", harmless(None, {"type": "text"}), ({"type": "json_object"}, "json"), kinds=CHAT),
    Row("modalities", harmless(None, ["text"]), (["audio"], "x"), kinds=CHAT),
    Row("audio", harmless(None), ({"voice": "x"},), kinds=CHAT),
    Row("prediction", harmless(None), ({"type": "content"},), kinds=CHAT),
    Row("reasoning_effort", harmless(None), ("high",), kinds=CHAT),
    Row("verbosity", harmless(None), ("high",), kinds=CHAT),
    Row("service_tier", harmless(None, "auto", "default"), ("priority",), kinds=CHAT),
    Row("web_search_options", harmless(None, {}), ({"x": 1},), kinds=CHAT),
    Row("chat_template", harmless(None), ("{{ x }}",), kinds=CHAT),
    Row("chat_template_kwargs", harmless(None, {}), ({"x": 1},), kinds=CHAT),
]
COMPLETION_ROWS = [
    Row(
        "prompt",
        (
            ("hi", lambda plan: plan.jobs[0].ids == [72, 73]),
            ([72, 73], lambda plan: plan.jobs[0].ids == [72, 73]),
            (["a", "b"], lambda plan: [job.ids for job in plan.jobs] == [[65], [66]]),
            ([[1], [2, 3]], lambda plan: [job.ids for job in plan.jobs] == [[1], [2, 3]]),
        ),
        ("", [], [""], [[]], None, 5, "é", [96], [-1], [1, "a"], ["a", 1], [[1, "a"]], "x" * 1000, ["a"] * 65, [1.5]),
        kinds=COMPLETION,
    ),
    Row(
        "echo",
        ((True, lambda plan: plan.jobs[0].echo == "hi"), (False, lambda plan: plan.jobs[0].echo == "")),
        ("x", 1),
        kinds=COMPLETION,
    ),
    Row("echo", (), (True,), (("logprobs", 1),), kinds=COMPLETION),
    Row(
        "logprobs",
        ((4, show("num_logprobs", 4)), (0, show("num_logprobs", 0)), (None, show("num_logprobs", -1))),
        (21, -1, "x", True),
        kinds=COMPLETION,
    ),
    Row("best_of", harmless(None, 1), (2, 0, "x"), kinds=COMPLETION),
    Row("best_of", harmless(3), (1,), (("n", 3),), kinds=COMPLETION),
    Row("suffix", harmless(None, ""), ("x", 1), kinds=COMPLETION),
]
TOKENIZE, DETOKENIZE = (TokenizeRequest,), (DetokenizeRequest,)
OTHER_ROWS = [
    Row("model", harmless("hashlm", None), ("x", 1), kinds=TOKENIZE + DETOKENIZE),
    Row("prompt", harmless("hi", ""), (None, 1, ["x"], "é"), kinds=TOKENIZE),
    Row("messages", (), ([], "x"), kinds=TOKENIZE),
    Row("messages", (), (USER,), kinds=TOKENIZE, param="prompt"),  # both
    Row("messages", harmless(USER), (), (("prompt", None),), kinds=TOKENIZE),
    Row("add_special_tokens", harmless(True, False, None), ("x",), kinds=TOKENIZE),
    Row("tokens", harmless([], [1, 2]), ([96], [-1], "x", None, ["a"]), kinds=DETOKENIZE),
]
ROWS = [*SHARED, *CHAT_ROWS, *COMPLETION_ROWS, *OTHER_ROWS]

# objects inside a body: field -> (good values, bad values)
MESSAGE_FIELDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "role": (("system", "developer", "user", "assistant"), ("tool", "", None, 1)),
    "content": (("x", "", [], [{"type": "text", "text": "x"}]), (None, 1, [1])),
    "name": (("x", None), (1,)),
    "refusal": ((None, ""), ("no",)),
    "annotations": ((None, []), ([1],)),
    "audio": ((None,), ({"id": "x"},)),
    "function_call": ((None,), ({"name": "f"},)),
    "tool_calls": ((None, []), ([{"id": "x"}],)),
}
PART_FIELDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "type": (("text",), ("image_url", None)),
    "text": (("x", ""), (None, 1)),
}
STREAM_FIELDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "include_usage": ((True, False, None), ("x", 1)),
    "include_obfuscation": ((True, False, None), ("x",)),
}


def run(kind: type, body: dict[str, Any]) -> GenerationPlan | None:
    """What the server does with a body before any node hears of it."""
    parsed: Any = PARSERS[kind].parse(json.dumps(body).encode())
    if kind is ChatRequest:
        return RESOLVER.chat(parsed, CONTEXT, CONTEXT)
    if kind is CompletionRequest:
        return RESOLVER.completion(parsed, CONTEXT)
    RESOLVER.check_model(parsed.model)
    if kind is DetokenizeRequest:
        RESOLVER.check_ids(parsed.tokens, "tokens")
        return None
    return None if RESOLVER.tokenize(parsed) is not None else None


def test_an_answer_of_no_given_length_fits_every_node() -> None:
    """Nodes hold different lengths; who asks for none must not be tied to the largest."""
    said = {"model": "hashlm", "messages": [{"role": "user", "content": "hi"}]}
    body: Any = PARSERS[ChatRequest].parse(json.dumps(said).encode())
    plan = RESOLVER.chat(body, 2000, 1000)
    (prompt,) = plan.jobs
    assert len(prompt.ids) + plan.sampling.max_tokens == 1000
    assert len(prompt.ids) + RESOLVER.chat(body, 2000, len(prompt.ids)).sampling.max_tokens == 2000


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 30 else text[:27] + "..."


GOOD = [
    pytest.param(kind, row, value, check, id=f"{kind.__name__}-{row.field}-{short(value)}")
    for row in ROWS for kind in row.kinds for value, check in row.good
]  # fmt: skip
BAD = [
    pytest.param(kind, row, value, id=f"{kind.__name__}-{row.field}-{short(value)}")
    for row in ROWS for kind in row.kinds for value in row.bad
]  # fmt: skip


@pytest.mark.parametrize(("kind", "row", "value", "check"), GOOD)
def test_a_field_does_what_it_says(kind: type, row: Row, value: Any, check: Check) -> None:
    plan = run(kind, {**BASES[kind], **dict(row.extra), row.field: value})
    assert plan is None or check(plan)


@pytest.mark.rule("H36")
@pytest.mark.parametrize(("kind", "row", "value"), BAD)
def test_a_wrong_value_is_refused_by_name(kind: type, row: Row, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        run(kind, {**BASES[kind], **dict(row.extra), row.field: value})
    assert 400 <= error.value.status < 500
    param = error.value.param or ""
    expected = row.param or row.field
    assert param == expected or param.startswith((expected + "[", expected + "."))
    assert len(error.value.message) < 600


@pytest.mark.parametrize("kind", PARSERS)
def test_every_field_has_a_row(kind: type) -> None:
    rows = {row.field for row in ROWS if kind in row.kinds and (row.good or row.bad)}
    assert set(kind.__struct_fields__) == rows  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", PARSERS)
def test_unknown_fields_are_named(kind: type) -> None:
    with pytest.raises(InvalidRequest) as error:
        run(kind, {**BASES[kind], "surprise": 1})
    assert error.value.param == "surprise"


@pytest.mark.parametrize("kind", PARSERS)
def test_missing_fields_are_named(kind: type) -> None:
    required = set(BASES[kind])
    for name in required:
        with pytest.raises(InvalidRequest) as error:
            run(kind, {key: value for key, value in BASES[kind].items() if key != name})
        assert error.value.param == name


NESTED = [
    (ChatMessage, MESSAGE_FIELDS, "messages[0]", lambda obj: {"messages": [{"role": "user", "content": "x", **obj}]}),
    (TextPart, PART_FIELDS, "messages[0].content[0]",
     lambda obj: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **obj}]}]}),
    (StreamOptions, STREAM_FIELDS, "stream_options", lambda obj: {"stream": True, "stream_options": obj}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "path", "wrap"), NESTED)
def test_fields_of_inner_objects(kind: Any, fields: Any, path: str, wrap: Callable[[Any], dict[str, Any]]) -> None:
    assert set(kind.__struct_fields__) == set(fields)
    base = BASES[ChatRequest]
    for name, (good, bad) in fields.items():
        for value in good:
            run(ChatRequest, {**base, **wrap({name: value})})
        for value in bad:
            with pytest.raises(InvalidRequest) as error:
                run(ChatRequest, {**base, **wrap({name: value})})
            assert (error.value.param or "").startswith(f"{path}.{name}")
    with pytest.raises(InvalidRequest) as error:
        run(ChatRequest, {**base, **wrap({"surprise": 1})})
    assert error.value.param == f"{path}.surprise"


BROKEN = [b"", b"{", b"[]", b"3", b'"x"', b"null", b'{"model":', b"\xff\xfe", b'{"model": NaN}', b'{"a":1}trailing',
          b'{"model": "\xff"}', b'{"tools":' + b"[" * 200_000, b"[" * 200_000]  # fmt: skip


@pytest.mark.parametrize("raw", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("kind", PARSERS)
def test_broken_json_is_a_4xx(kind: type, raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as error:
        PARSERS[kind].parse(raw)
    assert error.value.status == 400 and len(error.value.message) < 600


def test_roles_and_parts_reach_the_template() -> None:
    turns = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, *USER]
    plan = run(ChatRequest, {"model": "hashlm", "messages": turns})
    assert plan is not None
    assert "".join(chr(32 + i) for i in plan.jobs[0].ids) == "system: ab user: hi assistant: "


def test_defaults() -> None:
    chat, completion = (run(kind, BASES[kind]) for kind in GENERATIONS)
    assert chat is not None and completion is not None
    assert chat.sampling.max_tokens == CONTEXT - len(chat.jobs[0].ids)
    assert completion.sampling.max_tokens == 16
    for plan in (chat, completion):
        assert plan.sampling.temperature == 1.0 and plan.sampling.num_logprobs == -1
        assert plan.sampling.stop_token_ids == (95,) and not plan.show.stream
        assert 0 <= plan.jobs[0].seed < 2**64


def test_without_a_seed_each_prompt_draws_its_own() -> None:
    drawn = run(CompletionRequest, {"model": "hashlm", "prompt": ["a", "b"]})
    given = run(CompletionRequest, {"model": "hashlm", "prompt": ["a", "b"], "seed": 3})
    assert drawn is not None and given is not None
    assert drawn.jobs[0].seed != drawn.jobs[1].seed and given.jobs[0].seed == given.jobs[1].seed == 3


def test_a_prompt_limit_below_the_context() -> None:
    resolver = Resolver("hashlm", hash_text_model(), LimitsConfig(max_prompt_tokens=2))
    parsed: Any = PARSERS[CompletionRequest].parse(b'{"model":"hashlm","prompt":"abc"}')
    with pytest.raises(InvalidRequest) as error:
        resolver.completion(parsed, CONTEXT)
    assert error.value.param == "prompt"
