"""One row per field of every request schema: what it does, and what is refused with its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_type_hints

import anthropic.types.beta
import pytest
from openai.types import chat, completion_create_params, responses

from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.anthropic.messages import COUNT_TOKENS, MESSAGES, Messages, counted
from router.api.ask.generation_api import GenerationApi
from router.api.ask.resolve import Resolver
from router.api.fields.fields import (
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
)
from router.api.fields.parse import BodyParser
from router.api.ollama.ollama import OllamaChat, OllamaGenerate
from router.api.ollama.ollama_models import SHOW, shown_model
from router.api.openai.chat import CHAT, Chat
from router.api.openai.chat_messages import CalledFunction, ChatMessage, ContentPart, ToolCall
from router.api.openai.completions import COMPLETIONS, Completions
from router.api.openai.responses import RESPONSES, Responses
from router.api.openai.tokenization import DETOKENIZE, TOKENIZE, detokenized, tokenized
from router.http.ignored import names_in_header
from router.text.hashlm import hash_text_model
from router.tools.detect import AS_TEXT as HERMES
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import InvalidRequest
from tests.support.bodies.field_rows import (
    CONTEXT,
    GENERATIONS,
    SHARED,
    Check,
    Row,
    Table,
    calls,
    grammar_with,
    grammar_without,
    harmless,
    lowered,
    num_prompt,
    sampling,
    show,
)
from tests.support.bodies.messages_rows import MESSAGES_ROWS
from tests.support.bodies.nested_fields import (
    CALL,
    CALL_FIELDS,
    FORMAT_FIELDS,
    FUNCTION_FIELDS,
    MESSAGE_FIELDS,
    OUTPUTS_FIELDS,
    PART_FIELDS,
    SCHEMA,
    SCHEMA_FIELDS,
    STREAM_FIELDS,
)
from tests.support.bodies.ollama_rows import CARDS, OLLAMA_BASES, OLLAMA_ROWS
from tests.support.bodies.responses_rows import RESPONSES_ROWS

LIMITS = LimitsConfig(max_n=8)
RESOLVER = Resolver("hashlm", hash_text_model(), LIMITS, calls=HERMES)
MADE = (Chat(), Completions(), Messages(), Responses(), OllamaChat(), OllamaGenerate())
APIS: dict[Table, GenerationApi[Any]] = {api.table: api for api in MADE}
TABLES: tuple[Table, ...] = (*APIS, COUNT_TOKENS, TOKENIZE, DETOKENIZE, SHOW)
PARSERS: dict[Table, BodyParser[Any]] = {table: BodyParser(table) for table in TABLES}
STRICT: dict[Table, BodyParser[Any]] = {table: BodyParser(table, strict=True) for table in TABLES}
USER = [{"role": "user", "content": "hi"}]
BASES: dict[Table, dict[str, Any]] = {
    CHAT: {"model": "hashlm", "messages": USER},
    COMPLETIONS: {"model": "hashlm", "prompt": "hi"},
    MESSAGES: {"model": "hashlm", "messages": USER, "max_tokens": 5},
    RESPONSES: {"model": "hashlm", "input": "hi"},
    COUNT_TOKENS: {"model": "hashlm", "messages": USER},
    TOKENIZE: {"prompt": "hi"},
    DETOKENIZE: {"tokens": [1]},
} | OLLAMA_BASES
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OTHER_TOOL = {"type": "function", "function": {"name": "g"}}


CHAT_ROWS = [
    Row(
        "messages",
        ((USER, lambda plan: len(plan.jobs[0].ids) == len("user: hi assistant: ")),),
        ([], "hi", None, [{"role": "user", "content": "é"}], [{"role": "user", "content": "x" * 1000}]),
        kinds=(CHAT,),
    ),
    Row("max_completion_tokens", ((7, sampling("max_tokens", 7)),), (0, -2, "x"), kinds=(CHAT,)),
    Row("max_completion_tokens", ((8, sampling("max_tokens", 8)),), (), (("max_tokens", 7),), kinds=(CHAT,)),
    Row("max_completion_tokens", ((CONTEXT, lowered("max_completion_tokens", CONTEXT)),), kinds=(CHAT,)),
    Row("truncate_prompt_tokens", (), (-1,), (("max_tokens", CONTEXT),)),
    Row("logprobs", ((True, show("num_logprobs", 0)), (False, show("num_logprobs", -1))), (3, "x"), kinds=(CHAT,)),
    Row(
        "top_logprobs",
        ((3, show("num_logprobs", 3)), (3, sampling("num_logprobs", 3))),
        (21, -1, "x", 1.5),
        (("logprobs", True),),
        kinds=(CHAT,),
    ),
    Row("top_logprobs", ((0, show("num_logprobs", -1)),), (3,), (("logprobs", False),), kinds=(CHAT,)),
    Row("top_logprobs", ((0, show("num_logprobs", -1)),), (3,), kinds=(CHAT,)),
    Row("truncate_prompt_tokens", ((4, num_prompt(4)), (-1, num_prompt(20))), (-2, "x", 1.5), kinds=(CHAT,)),
    Row("add_special_tokens", harmless(False, None), (True, "x"), kinds=(CHAT,)),
    *(
        Row(name, good, bad, kinds=kinds)
        for kinds in ((CHAT,), (TOKENIZE,))
        for name, good, bad in (
            (
                "chat_template_kwargs",
                harmless({"x": 1, "y": "z", "w": True}, {}, None),
                ("x", [1], {"x": [1]}, {"x": {}}),
            ),
            ("documents", harmless([], [{"text": "x"}], None), ("x", [1])),
            ("enable_thinking", harmless(True, False, None), ("x", 1)),
            ("reasoning_effort", harmless("none", "high", None), (1, "x" * 513)),
            ("add_generation_prompt", harmless(True, False, None), ("x", 1)),
            ("continue_final_message", harmless(False, None), ("x", 1)),
        )
    ),
    Row(
        "tools",
        ((None, calls()), ([], calls()), ([TOOL], calls("f")), ([TOOL, OTHER_TOOL], calls("f", "g"))),
        ([{"type": "function"}], "x", [3], [{"type": "web_search"}], [TOOL, TOOL], [{**TOOL, "function": {}}]),
        kinds=(CHAT,),
    ),
    Row("tools", (), ([TOOL],), (("ignore_eos", True),), kinds=(CHAT,), param="ignore_eos"),
    Row("tools", (), ([TOOL],), (("guided_regex", "x"), ("tool_choice", "required")), kinds=(CHAT,)),
    Row("tools", ((([TOOL]), calls()),), (), (("tool_choice", "none"),), kinds=(CHAT,)),
    Row(
        "tool_choice",
        (
            ("auto", calls("f", "g")),
            ("none", calls()),
            ("required", calls("f", "g")),
            ({"type": "function", "function": {"name": "g"}}, calls("g")),
        ),
        ("sometimes", {"x": 1}, {"type": "function", "function": {"name": "h"}}, 3),
        (("tools", [TOOL, OTHER_TOOL]),),
        kinds=(CHAT,),
    ),
    Row("tool_choice", harmless(None, "none", "auto"), ("required",), kinds=(CHAT,)),
    Row(
        "parallel_tool_calls",
        ((False, grammar_without(" group*")), (True, grammar_with(" group*"))),
        ("x", 1),
        (("tools", [TOOL]),),
        kinds=(CHAT,),
    ),
    Row("tools", harmless(None, [], [TOOL]), ("x", [3]), (("prompt", None), ("messages", USER)), kinds=(TOKENIZE,)),
    Row("functions", harmless(None, []), ([{"name": "f"}],), kinds=(CHAT,)),
    Row("function_call", harmless(None, "none"), ("auto", {"name": "f"}), kinds=(CHAT,)),
    Row("modalities", harmless(None, ["text"]), (["audio"], "x"), kinds=(CHAT,)),
    Row("audio", harmless(None), ({"voice": "x"},), kinds=(CHAT,)),
    Row("moderation", harmless(None), ({"model": "x"},), kinds=(CHAT,)),
    Row("web_search_options", harmless(None, {}), ({"x": 1},), kinds=(CHAT,)),
    Row("chat_template", harmless(None), ("{{ x }}",), kinds=(CHAT,)),
    Row("echo", harmless(None, False), (True,), kinds=(CHAT,)),
    Row("best_of", harmless(None, 1), (2,), kinds=(CHAT,)),
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
        kinds=(COMPLETIONS,),
    ),
    Row(
        "echo",
        ((True, lambda plan: plan.jobs[0].echo == "hi"), (False, lambda plan: plan.jobs[0].echo == "")),
        ("x", 1),
        kinds=(COMPLETIONS,),
    ),
    Row(
        "echo",
        ((True, sampling("prompt_logprobs", 1)), (True, show("echoes_logprobs", True))),
        (),
        (("logprobs", 1),),
        kinds=(COMPLETIONS,),
    ),
    Row(
        "logprobs",
        (
            (4, show("num_logprobs", 4)),
            (0, show("num_logprobs", 0)),
            *((nothing, show("num_logprobs", -1)) for nothing in (None, False)),
        ),
        (21, -1, "x", True),
        kinds=(COMPLETIONS,),
    ),
    Row("best_of", harmless(None, 1), (2, 0, "x"), kinds=(COMPLETIONS,)),
    Row("best_of", harmless(3), (1,), (("n", 3),), kinds=(COMPLETIONS,)),
    Row("suffix", harmless(None, ""), ("x", 1), kinds=(COMPLETIONS,)),
    Row(
        "truncate_prompt_tokens",
        ((1, lambda plan: plan.jobs[0].ids == [73]), (-1, num_prompt(2)), (5, num_prompt(2))),
        (-2, "x", 1.5),
        kinds=(COMPLETIONS,),
    ),
    Row("add_special_tokens", harmless(True, False, None), ("x",), kinds=(COMPLETIONS,)),
]
OTHER_ROWS = [
    Row("model", harmless("hashlm", None), ("x", 1), kinds=(TOKENIZE, DETOKENIZE)),
    Row("prompt", harmless("hi", ""), (None, 1, ["x"], "é"), kinds=(TOKENIZE,)),
    Row("messages", (), ([], "x"), kinds=(TOKENIZE,)),
    Row("messages", (), (USER,), kinds=(TOKENIZE,), param="prompt"),  # both
    Row("messages", harmless(USER), (), (("prompt", None),), kinds=(TOKENIZE,)),
    Row("content", harmless("hi"), (1, ["x"], "é"), (("prompt", None),), kinds=(TOKENIZE,)),
    Row("add_special", harmless(True, False, None), ("x",), kinds=(TOKENIZE,)),
    Row("with_pieces", harmless(True, False, None), ("x",), kinds=(TOKENIZE,)),
    Row("return_token_strs", harmless(True, False, None), ("x",), kinds=(TOKENIZE,)),
    Row("chat_template", harmless(None), ("{{ x }}",), kinds=(TOKENIZE,)),
    Row("add_special_tokens", harmless(True, False, None), ("x",), kinds=(TOKENIZE,)),
    Row("tokens", harmless([], [1, 2]), ([96], [-1], "x", None, ["a"]), kinds=(DETOKENIZE,)),
]
ROWS = [*SHARED, *CHAT_ROWS, *COMPLETION_ROWS, *OTHER_ROWS, *MESSAGES_ROWS, *RESPONSES_ROWS, *OLLAMA_ROWS]


def run(table: Table, body: dict[str, Any], parsers: dict[Table, BodyParser[Any]] = PARSERS) -> GenerationPlan | None:
    """What the server does with a body before any node hears of it."""
    parsed: Any = parsers[table].parse(json.dumps(body).encode()).body
    if table in APIS:
        return APIS[table].plan(parsed, RESOLVER, Contexts(CONTEXT, CONTEXT))
    assert OTHERS[table](parsed)
    return None


OTHERS: dict[Table, Callable[[Any], object]] = {
    TOKENIZE: lambda body: tokenized(body, RESOLVER, CONTEXT, {}),
    DETOKENIZE: lambda body: detokenized(body, RESOLVER),
    COUNT_TOKENS: lambda body: counted(body, RESOLVER, {}),
    SHOW: lambda body: shown_model(body, CARDS, RESOLVER),
}


def ignored(table: Table, body: dict[str, Any]) -> tuple[str, ...]:
    return PARSERS[table].parse(json.dumps({**BASES[table], **body}).encode()).ignored


def test_an_answer_of_no_given_length_fits_every_node() -> None:
    """Nodes hold different lengths; who asks for none must not be tied to the largest."""
    said = {"model": "hashlm", "messages": [{"role": "user", "content": "hi"}]}
    body: Any = PARSERS[CHAT].parse(json.dumps(said).encode()).body
    plan = Chat().plan(body, RESOLVER, Contexts(2000, 1000))
    (prompt,) = plan.jobs
    assert len(prompt.ids) + plan.sampling.max_tokens == 1000
    assert len(prompt.ids) + Chat().plan(body, RESOLVER, Contexts(2000, len(prompt.ids))).sampling.max_tokens == 2000


def short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 30 else text[:27] + "..."


GOOD = [
    pytest.param(kind, row, value, check, id=f"{kind.path}-{row.field}-{short(value)}")
    for row in ROWS for kind in row.kinds for value, check in row.good
]  # fmt: skip
BAD = [
    pytest.param(kind, row, value, id=f"{kind.path}-{row.field}-{short(value)}")
    for row in ROWS for kind in row.kinds for value in row.bad
]  # fmt: skip


@pytest.mark.parametrize(("kind", "row", "value", "check"), GOOD)
def test_a_field_does_what_it_says(kind: Table, row: Row, value: Any, check: Check) -> None:
    plan = run(kind, {**BASES[kind], **dict(row.extra), row.field: value})
    assert plan is None or check(plan)


@pytest.mark.rule("H36")
@pytest.mark.parametrize(("kind", "row", "value"), BAD)
def test_a_wrong_value_is_refused_by_name(kind: Table, row: Row, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        run(kind, {**BASES[kind], **dict(row.extra), row.field: value})
    assert 400 <= error.value.status < 500
    param = error.value.param or ""
    expected = row.param or row.field
    assert param == expected or param.startswith((expected + "[", expected + "."))
    assert len(error.value.message) < 600


PATHS = [pytest.param(table, id=table.path) for table in TABLES]


@pytest.mark.parametrize("kind", PATHS)
def test_every_field_has_a_row(kind: Table) -> None:
    rows = {row.field for row in ROWS if kind in row.kinds and (row.good or row.bad)}
    assert {*kind.served.__struct_fields__, *kind.refused} == rows


@pytest.mark.parametrize("kind", PATHS)
def test_a_field_without_effect_is_taken_and_named(kind: Table) -> None:
    for name in kind.ignored:
        for value in ("x", 1, True, {"a": None}, [1]):
            assert ignored(kind, {name: value}) == (name,)
            run(kind, {**BASES[kind], name: value}, STRICT)
        assert ignored(kind, {name: None}) == ()


@pytest.mark.parametrize("kind", PATHS)
def test_an_unknown_field_is_named_or_refused(kind: Table) -> None:
    assert ignored(kind, {"surprise": 1, "nothing": None}) == ("surprise",)
    run(kind, {**BASES[kind], "surprise": {"deep": [1]}})
    with pytest.raises(InvalidRequest) as error:
        run(kind, {**BASES[kind], "surprise": 1}, STRICT)
    assert error.value.param == "surprise"


@pytest.mark.parametrize("kind", PATHS)
def test_null_is_absent(kind: Table) -> None:
    names = [*kind.served.__struct_fields__, *kind.ignored, *kind.refused, "surprise"]
    nulls = {name: None for name in names if name not in BASES[kind]}
    assert ignored(kind, nulls) == ()
    for parsers in (PARSERS, STRICT):
        run(kind, {**BASES[kind], **nulls}, parsers)


def test_many_unknown_fields_do_not_hide_a_refused_one() -> None:
    odd = [{"role": "user", "content": "x", "a": 1, "b": 2} for _ in range(800)]
    with pytest.raises(InvalidRequest) as error:
        run(CHAT, {"messages": odd, "functions": [{"name": "f"}]})
    assert error.value.param == "functions"


def test_a_prompt_s_scores_are_bounded() -> None:
    resolver = Resolver("hashlm", hash_text_model(), LimitsConfig(max_scores=100))
    for name, sent in (("echo", {"echo": True, "logprobs": 1}), ("prompt_logprobs", {"prompt_logprobs": 1})):
        for body, fits in (
            ({"prompt": "x" * 50}, True),
            ({"prompt": ["x" * 26] * 2}, False),
            ({"prompt": "x" * 26, "n": 2}, False),
        ):
            parsed: Any = PARSERS[COMPLETIONS].parse(json.dumps(sent | body).encode()).body
            if fits:
                Completions().plan(parsed, resolver, Contexts(CONTEXT, CONTEXT))
                continue
            with pytest.raises(InvalidRequest) as error:
                Completions().plan(parsed, resolver, Contexts(CONTEXT, CONTEXT))
            assert error.value.param == name


def test_the_header_is_short() -> None:
    header = names_in_header([f"{i}" + "é" * 60 for i in range(10)])
    assert len(header) <= 1024 + len(",...") and header.endswith(b",...")


def test_the_header_names_sixteen_and_nothing_odd() -> None:
    names = [f"x{i}\r\nSet-Cookie: é" for i in range(20)]
    header = names_in_header(ignored(CHAT, dict.fromkeys(names, 1)))
    assert header.isascii() and header.count(b",") == 16 and header.endswith(b",...")
    assert b"\n" not in header and b"\r" not in header and b" " not in header
    assert names_in_header(["messages[0].x", "a-b_c"]) == b"messages[0].x,a-b_c"


PARAMS = [
    (CHAT, chat.completion_create_params.CompletionCreateParamsStreaming),
    (COMPLETIONS, completion_create_params.CompletionCreateParamsStreaming),
    (RESPONSES, responses.response_create_params.ResponseCreateParamsStreaming),
    (MESSAGES, anthropic.types.message_create_params.MessageCreateParamsStreaming),
    (MESSAGES, anthropic.types.beta.message_create_params.MessageCreateParamsStreaming),
    (COUNT_TOKENS, anthropic.types.message_count_tokens_params.MessageCountTokensParams),
]
IN_HEADERS = {"betas", "user_profile_id", "workspace_id"}  # what Anthropic's SDK sends there


@pytest.mark.parametrize(("kind", "params"), PARAMS)
def test_every_parameter_of_the_sdks_is_in_the_table(kind: Table, params: Any) -> None:
    named = set(get_type_hints(params)) - IN_HEADERS
    assert not named - {*kind.served.__struct_fields__, *kind.ignored, *kind.refused}


@pytest.mark.parametrize("kind", PATHS)
def test_missing_fields_are_named(kind: Table) -> None:
    for name in set(BASES[kind]) - {"model"}:
        with pytest.raises(InvalidRequest) as error:
            run(kind, {key: value for key, value in BASES[kind].items() if key != name})
        assert error.value.param == name


NESTED = [
    (ChatMessage, MESSAGE_FIELDS, "messages[0]", lambda obj: {"messages": [{"role": "user", "content": "x", **obj}]}),
    (ContentPart, PART_FIELDS, "messages[0].content[0]",
     lambda obj: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **obj}]}]}),
    (ToolCall, CALL_FIELDS, "messages[0].tool_calls[0]",
     lambda obj: {"messages": [{"role": "assistant", "tool_calls": [{**CALL, **obj}]}]}),
    (CalledFunction, FUNCTION_FIELDS, "messages[0].function_call",
     lambda obj: {"messages": [{"role": "assistant", "function_call": {"name": "f", **obj}}]}),
    (ResponseFormat, FORMAT_FIELDS, "response_format", lambda obj: {"response_format": {"type": "text", **obj}}),
    (JsonSchemaFormat, SCHEMA_FIELDS, "response_format.json_schema",
     lambda obj: {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, **obj}}}),
    (StructuredOutputs, OUTPUTS_FIELDS, "structured_outputs", lambda obj: {"structured_outputs": obj}),
    (StreamOptions, STREAM_FIELDS, "stream_options", lambda obj: {"stream": True, "stream_options": obj}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "path", "wrap"), NESTED)
def test_fields_of_inner_objects(kind: Any, fields: Any, path: str, wrap: Callable[[Any], dict[str, Any]]) -> None:
    assert set(kind.__struct_fields__) == set(fields)
    base = BASES[CHAT]
    for name, (good, bad) in fields.items():
        for value in good:
            run(CHAT, {**base, **wrap({name: value})}, STRICT)
        for value in bad:
            with pytest.raises(InvalidRequest) as error:
                run(CHAT, {**base, **wrap({name: value})})
            assert (error.value.param or "").startswith(f"{path}.{name}")
    assert ignored(CHAT, wrap({"surprise": 1})) == (f"{path}.surprise",) and not ignored(CHAT, wrap({"surprise": None}))
    with pytest.raises(InvalidRequest) as error:
        run(CHAT, {**base, **wrap({"surprise": 1})}, STRICT)
    assert error.value.param == f"{path}.surprise"


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
    for more, num_seeds in (({}, 2), ({"seed": 3}, 1)):
        plan = run(COMPLETIONS, {"model": "hashlm", "prompt": ["a", "b"], **more})
        assert plan is not None and len({job.seed for job in plan.jobs}) == num_seeds
