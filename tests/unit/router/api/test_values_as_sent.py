"""Numbers, lists and texts in the forms that clients send: whole floats, numbers as texts, -1, empty stops, half
characters."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.anthropic.messages import MESSAGES, Messages
from router.api.ask.generation_api import GenerationApi
from router.api.ask.resolve import Resolver
from router.api.fields.fields import FieldTable
from router.api.fields.lenient import LEAST_INEXACT, with_whole_characters
from router.api.fields.parse import BodyParser
from router.api.ollama.ollama import OLLAMA_CHAT, OLLAMA_GENERATE, OllamaChat
from router.api.openai.chat import CHAT, Chat
from router.api.openai.completions import COMPLETIONS, Completions
from router.api.openai.responses import RESPONSES, Responses, echo_of
from router.text.hashlm import hash_text_model
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import InvalidRequest
from tests.support.machine.growth import grows_linearly

USER = [{"role": "user", "content": "hi"}]
BASES: dict[FieldTable[Any], dict[str, Any]] = {
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 5},
    RESPONSES: {"input": "hi"},
    OLLAMA_CHAT: {"messages": USER},
    OLLAMA_GENERATE: {"prompt": "hi"},
}
APIS: dict[FieldTable[Any], GenerationApi[Any]] = {
    api.table: api for api in (Chat(), Completions(), Messages(), Responses(), OllamaChat())
}
CONTEXT = 512
LIMITS = LimitsConfig(default_max_tokens=9)
RESOLVER = Resolver("hashlm", hash_text_model(), LIMITS)


def parsed(table: FieldTable[Any], more: dict[str, Any], *, strict: bool = False) -> Any:
    return BodyParser(table, strict=strict).parse(json.dumps(BASES[table] | more).encode()).body


def plan_of(table: FieldTable[Any], more: dict[str, Any], *, strict: bool = False) -> GenerationPlan:
    return APIS[table].plan(parsed(table, more, strict=strict), RESOLVER, Contexts(CONTEXT, CONTEXT))


def refused(table: FieldTable[Any], more: dict[str, Any], *, strict: bool = False) -> str | None:
    with pytest.raises(InvalidRequest) as error:
        plan_of(table, more, strict=strict)
    assert error.value.param is not None and error.value.param in error.value.message
    return error.value.param


# ---- numbers


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("table", "more", "same"),
    [
        (CHAT, {"max_tokens": 8.0, "seed": 42.0}, {"max_tokens": 8, "seed": 42}),
        (CHAT, {"n": 1.0, "top_k": 5.0, "seed": 0}, {"n": 1, "top_k": 5, "seed": 0}),
        (CHAT, {"stop_token_ids": [3.0, 4], "seed": -1.0}, {"stop_token_ids": [3, 4], "seed": -1}),
        (CHAT, {"logprobs": True, "top_logprobs": 2.0, "seed": 0}, {"logprobs": True, "top_logprobs": 2, "seed": 0}),
        (COMPLETIONS, {"prompt": [72.0, 73], "logprobs": 1.0, "seed": 0},
         {"prompt": [72, 73], "logprobs": 1, "seed": 0}),
        (COMPLETIONS, {"prompt": [[72.0], [73]], "max_tokens": 1e2, "seed": 0},
         {"prompt": [[72], [73]], "max_tokens": 100, "seed": 0}),
        (MESSAGES, {"max_tokens": 7.0, "seed": 1.0}, {"max_tokens": 7, "seed": 1}),
        (RESPONSES, {"max_output_tokens": 7.0, "seed": 1.0}, {"max_output_tokens": 7, "seed": 1}),
        (OLLAMA_CHAT, {"options": {"num_predict": 2.0, "seed": 42.0}}, {"options": {"num_predict": 2, "seed": 42}}),
    ],
)  # fmt: skip
def test_a_whole_float_is_an_integer(
    table: FieldTable[Any], more: dict[str, Any], same: dict[str, Any], strict: bool
) -> None:
    """JSON has one kind of number, and languages without integers write 8.0."""
    assert plan_of(table, more, strict=strict) == plan_of(table, same)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("table", "more", "name"),
    [
        (CHAT, {"max_tokens": 8.5}, "max_tokens"),
        (CHAT, {"n": 1.5}, "n"),
        (CHAT, {"n": 0.0}, "n"),
        (CHAT, {"n": True}, "n"),
        (CHAT, {"seed": 2.0**53 + 2}, "seed"),  # who knows which integer it was
        (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
        (OLLAMA_CHAT, {"options": {"num_predict": 2.5}}, "options.num_predict"),
    ],
)
def test_another_float_is_refused_by_name(
    table: FieldTable[Any], more: dict[str, Any], name: str, strict: bool
) -> None:
    assert refused(table, more, strict=strict) == name


def test_the_largest_float_that_is_one_integer() -> None:
    for seed, fits in ((LEAST_INEXACT - 1, True), (LEAST_INEXACT, False)):
        assert float(seed) == seed
        if fits:
            assert parsed(CHAT, {"seed": float(seed)}).seed == seed
        else:
            assert refused(CHAT, {"seed": float(seed)}) == "seed"


NUMBERS_AS_TEXT = [
    (CHAT, {"temperature": "0.7", "seed": "3"}, {"temperature": 0.7, "seed": 3}),
    (CHAT, {"max_tokens": "8", "n": "2.0", "seed": " 3 "}, {"max_tokens": 8, "n": 2, "seed": 3}),
    (CHAT, {"logit_bias": {"3": "-1.5"}, "seed": 0}, {"logit_bias": {"3": -1.5}, "seed": 0}),
    (CHAT, {"allowed_token_ids": ["1", 2], "seed": 0}, {"allowed_token_ids": [1, 2], "seed": 0}),
    (OLLAMA_CHAT, {"options": {"num_predict": "2", "seed": 0}}, {"options": {"num_predict": 2, "seed": 0}}),
]  # fmt: skip


@pytest.mark.parametrize(("table", "more", "same"), NUMBERS_AS_TEXT)
def test_a_number_as_text_is_the_number(table: FieldTable[Any], more: dict[str, Any], same: dict[str, Any]) -> None:
    assert plan_of(table, more) == plan_of(table, same)
    refused(table, more, strict=True)


TEXTS = ("", " ", "x", "0.7x", "NaN", "Infinity", "true", "null", "[1]", "0x1", "1" * 400, "1e999")


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_no_number_is_refused(text: str) -> None:
    assert refused(CHAT, {"temperature": text}) == "temperature"
    assert refused(CHAT, {"seed": text}) == "seed"


def test_a_text_stays_text_where_texts_are_taken() -> None:
    body = parsed(CHAT, {"stop": "7", "user": 1, "messages": [{"role": "user", "content": "0.5", "name": "1"}],
                         "chat_template_kwargs": {"a": "1", "b": 2.0}, "tools": [], "surprise": 1})  # fmt: skip
    assert body.stop == "7" and body.messages[0].content == "0.5" and body.messages[0].name == "1"
    assert body.chat_template_kwargs == {"a": "1", "b": 2.0} and type(body.chat_template_kwargs["b"]) is float
    assert parsed(COMPLETIONS, {"prompt": ["1"], "surprise": 1}).prompt == ["1"]
    assert parsed(OLLAMA_CHAT, {"keep_alive": "300", "surprise": 1}).keep_alive == "300"


def test_top_p_0_draws_the_likeliest_token() -> None:
    """As with OpenAI's, Anthropic's and Ollama's APIs. Nodes take no 0: the least share is the likeliest token's."""
    for table, more in ((CHAT, {"top_p": 0}), (COMPLETIONS, {"top_p": 0.0}), (OLLAMA_CHAT, {"options": {"top_p": 0}})):
        assert 0 < plan_of(table, more).sampling.top_p < 1 / (1 << 24)
    assert refused(CHAT, {"top_p": -0.1}) == "top_p"


# ---- the longest answer


CAPS: list[tuple[FieldTable[Any], Callable[[float], dict[str, Any]], str]] = [
    (CHAT, lambda cap: {"max_tokens": cap}, "max_tokens"),
    (CHAT, lambda cap: {"max_completion_tokens": cap}, "max_completion_tokens"),
    (COMPLETIONS, lambda cap: {"max_tokens": cap}, "max_tokens"),
    (MESSAGES, lambda cap: {"max_tokens": cap}, "max_tokens"),
    (RESPONSES, lambda cap: {"max_output_tokens": cap}, "max_output_tokens"),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("table", "with_cap", "name"), CAPS)
def test_a_cap_of_minus_one_is_no_cap(table: FieldTable[Any], with_cap: Any, name: str, strict: bool) -> None:
    """Neither the server's default nor that of completions counts: the client has said something else."""
    for cap in (-1, -1.0):
        plan = plan_of(table, with_cap(cap), strict=strict)
        assert len(plan.jobs[0].ids) + plan.sampling.max_tokens == CONTEXT and not plan.headers
        assert not plan.show.hides_answer
    for cap in (-2, -100, -1.5):
        assert refused(table, with_cap(cap), strict=strict) == name


@pytest.mark.parametrize(("table", "with_cap", "name"), CAPS)
def test_a_cap_of_zero_reads_the_prompt_only_or_is_refused(table: FieldTable[Any], with_cap: Any, name: str) -> None:
    if table in (CHAT, RESPONSES):
        assert refused(table, with_cap(0)) == name
    else:
        assert plan_of(table, with_cap(0)).show.hides_answer


def test_no_cap_beside_another_name_of_it() -> None:
    assert plan_of(CHAT, {"max_tokens": 7, "max_completion_tokens": -1}).sampling.max_tokens > 7
    assert plan_of(CHAT, {"max_tokens": -1, "max_completion_tokens": 7}).sampling.max_tokens == 7
    assert refused(CHAT, {"max_tokens": 0, "max_completion_tokens": 7}) == "max_tokens"


def test_an_answer_says_that_it_had_no_cap() -> None:
    body, plan = parsed(RESPONSES, {"max_output_tokens": -1}), plan_of(RESPONSES, {"max_output_tokens": -1})
    assert echo_of(body, plan.sampling)["max_output_tokens"] is None


# ---- stops


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("given", "stops"),
    [("", ()), ([""], ()), ([], ()), (None, ()), (["", "a", ""], ("a",)), ([""] * 16 + ["a", "b"], ("a", "b"))],
)
def test_an_empty_stop_asks_for_nothing(given: Any, stops: tuple[str, ...], strict: bool) -> None:
    for table, more in (
        (CHAT, {"stop": given}),
        (COMPLETIONS, {"stop": given}),
        (MESSAGES, {"stop_sequences": given if isinstance(given, list) else None}),
        (OLLAMA_CHAT, {"options": {"stop": given}}),
    ):
        assert plan_of(table, more, strict=strict).show.stops == stops


# ---- characters

HALVES = [r"a\ud83d", r"\udc00\ud800", r"\ud83dx", r"\uD83D\ud83d", r"\\\ud83d", r"\ud83d\\ude00", r"\ud83d\n"]
WHOLE = [r"\ud83d\ude00", r"\\ud83d", r"\\\\ud83d", r"\u00e9", r"\ud7ff", r"\ue000", "é", r"\"\\\/\b"]


@pytest.mark.parametrize("text", [*HALVES, *WHOLE])
def test_half_a_character_becomes_a_replacement(text: str) -> None:
    """The expected text is Python's own reading, in which each lone surrogate is replaced."""
    raw = f'{{"prompt":"{text}"}}'.encode()
    expected = json.loads(raw)["prompt"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    body = BodyParser(COMPLETIONS).parse(raw).body
    assert body.prompt == expected and ("\ufffd" in body.prompt) is (text in HALVES)


def test_half_a_character_beside_an_unknown_field() -> None:
    found = BodyParser(COMPLETIONS).parse(rb'{"x\ud83d":1.0,"prompt":"\ud83d","n":1.0}')
    assert found.body.prompt == "\ufffd" and found.body.n == 1 and found.ignored == ("x\ufffd",)


def test_a_body_that_is_broken_elsewhere_stays_refused() -> None:
    for raw in (
        rb'{"prompt":"\ud83d"',
        rb'{"prompt":"\ud83"}',
        rb'{"prompt":"\ud83d\x"}',
        b'{"prompt":"\xed\xa0\xbd"}',
    ):
        with pytest.raises(InvalidRequest) as error:
            BodyParser(COMPLETIONS).parse(raw)
        assert "not valid JSON" in error.value.message


@pytest.mark.parametrize("part", [rb"\ud83d", rb"\ud83d\ude00", rb"\\", rb"\n", rb"\\\ud83d"])
def test_whole_characters_take_linear_time(part: bytes) -> None:
    assert grows_linearly(lambda num: with_whole_characters(part * num + rb"\ud800"), 2000)
