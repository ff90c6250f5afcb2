"""Limits on answers that do not fit after the prompt: lowered and named, or refused by a strict router."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from router.api.answer.generation_plan import Contexts
from router.api.anthropic.messages import Messages
from router.api.ask.resolve import Resolver
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT, Chat
from router.api.openai.completions import COMPLETIONS, Completions
from router.api.openai.responses import Responses
from router.app import make_resolver
from router.http.ignored import LOWERED
from router.text.hashlm import hash_text_model
from router.tools.detect import Speech
from shared.config.load import load
from shared.config.processes import RouterProcessConfig
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import InvalidRequest
from shared.core.sampling_params import NEUTRAL
from tests.support.bodies.field_rows import CONTEXT

USER = [{"role": "user", "content": "hi"}]
CONTEXTS = Contexts(CONTEXT, CONTEXT)
TEXT = hash_text_model()


@pytest.mark.parametrize(
    ("api", "field", "body"),
    [
        (Chat(), "max_tokens", {"messages": USER}),
        (Chat(), "max_completion_tokens", {"messages": USER}),
        (Completions(), "max_tokens", {"prompt": "hi"}),
        (Messages(), "max_tokens", {"messages": USER}),
        (Responses(), "max_output_tokens", {"input": "hi"}),
    ],
)
def test_a_strict_router_refuses_a_limit_beyond_the_context(api: Any, field: str, body: dict[str, Any]) -> None:
    """On this code agents shorten their conversation."""
    parsed = BodyParser(api.table).parse(json.dumps(body | {field: 32_000}).encode()).body
    plan = api.plan(parsed, Resolver("m", TEXT, LimitsConfig()), CONTEXTS)
    assert plan.headers[LOWERED] == f"{field};from=32000;to={CONTEXT - len(plan.jobs[0].ids)}".encode()
    with pytest.raises(InvalidRequest, match=f"{field} is 32000") as error:
        api.plan(parsed, Resolver("m", TEXT, LimitsConfig(), is_strict=True), CONTEXTS)
    assert (error.value.param, error.value.code) == (field, "context_length_exceeded")


def test_clients_know_a_prompt_that_is_too_long_by_its_text() -> None:
    """LiteLLM looks for these words and not for the code, and only then falls back on another model."""
    for limits in (LimitsConfig(), LimitsConfig(max_prompt_tokens=5)):
        for prompt in ("long " * CONTEXT, "long " * CONTEXT * 400):
            body = BodyParser(CHAT).parse(json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()).body
            with pytest.raises(InvalidRequest, match="this model's maximum context length is"):
                Chat().plan(body, replace(Resolver("m", TEXT, limits), max_chars=CONTEXT * 1000), CONTEXTS)


def test_a_prompt_limit_below_the_context() -> None:
    body = BodyParser(COMPLETIONS).parse(b'{"prompt": "abc"}').body
    for most, fits in ((3, True), (2, False)):
        resolver = Resolver("m", TEXT, LimitsConfig(max_prompt_tokens=most))
        if fits:
            Completions().plan(body, resolver, CONTEXTS)
            continue
        with pytest.raises(InvalidRequest) as error:
            Completions().plan(body, resolver, CONTEXTS)
        assert error.value.param == "prompt"


def test_the_newer_name_of_the_limit_wins() -> None:
    for older, skipped in ((7, ("max_tokens",)), (8, ())):
        sent = {"messages": USER, "max_tokens": older, "max_completion_tokens": 8}
        body = BodyParser(CHAT).parse(json.dumps(sent).encode()).body
        assert Chat().skipped(body) == skipped
        assert Chat().plan(body, Resolver("m", TEXT, LimitsConfig()), CONTEXTS).sampling.max_tokens == 8


@pytest.mark.parametrize(
    ("most", "wanted", "expected"), [(0, None, None), (20, None, 20), (20, 50, 50), (10**6, None, None)]
)
def test_an_answer_without_a_limit_gets_the_router_s(most: int, wanted: int | None, expected: int | None) -> None:
    """None: all that fits. A completion's own default, 16, is less."""
    resolver = Resolver("m", TEXT, LimitsConfig(default_max_tokens=most))
    sent = {"messages": USER} | ({} if wanted is None else {"max_tokens": wanted})
    plan = Chat().plan(BodyParser(CHAT).parse(json.dumps(sent).encode()).body, resolver, CONTEXTS)
    assert plan.sampling.max_tokens == (expected or CONTEXT - len(plan.jobs[0].ids)) and not plan.headers
    text = Completions().plan(BodyParser(COMPLETIONS).parse(b'{"prompt": "hi"}').body, resolver, CONTEXTS)
    assert text.sampling.max_tokens == min(16, CONTEXT)


@pytest.mark.parametrize(("model", "given", "expected"), [("smollm2", 0, 1024), ("smollm2", 7, 7), ("hashlm", 0, 0)])
def test_only_the_shipped_model_has_a_limit_of_its_own(model: str, given: int, expected: int) -> None:
    config = load(RouterProcessConfig, {"model": {"model": model}, "limits": {"default_max_tokens": given}})
    made = make_resolver(config, Mock(), Speech(TEXT, None, ""), NEUTRAL)
    assert made.limits.default_max_tokens == expected
