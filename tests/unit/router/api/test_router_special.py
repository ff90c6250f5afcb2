"""Begin tokens: which prompts get one, and which fields say so. How many tokens a request may allow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.api.answer.generation_plan import Contexts
from router.api.ask.resolve import Resolver
from router.api.ask.token_rules import allowed_ids_of
from router.api.fields.fields import FieldTable
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT, Chat
from router.api.openai.completions import COMPLETIONS, Completions
from router.api.openai.tokenization import TOKENIZE, ids_of
from router.text.chat.interface import TextModel
from router.text.hashlm import HashTokenizer, hash_text_model
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import InvalidRequest
from shared.core.sampling_params import MAX_ALLOWED_TOKEN_IDS

BEGIN = 7


class WithBegin(HashTokenizer):
    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [BEGIN] * add_special + super().encode(text, add_special=add_special)


RESOLVER = Resolver("hashlm", TextModel(WithBegin(), hash_text_model().template), LimitsConfig())
CONTEXTS = Contexts(1000, 1000)
USER = {"messages": [{"role": "user", "content": "hi"}]}


def begins(table: FieldTable[Any], **body: Any) -> bool:
    parsed = BodyParser(table).parse(json.dumps(body).encode()).body
    if table is TOKENIZE:
        return ids_of(parsed, RESOLVER, {})[0] == BEGIN
    api: Any = Chat() if table is CHAT else Completions()
    return api.plan(parsed, RESOLVER, CONTEXTS).jobs[0].ids[0] == BEGIN


@pytest.mark.parametrize(
    ("table", "base", "field", "default"),
    [
        (COMPLETIONS, {"prompt": "hi"}, "add_special_tokens", True),
        (TOKENIZE, {"prompt": "hi"}, "add_special_tokens", True),
        (TOKENIZE, {"content": "hi"}, "add_special", False),  # as llama-server
    ],
)
def test_who_gets_a_begin_token(table: FieldTable[Any], base: dict[str, Any], field: str, default: bool) -> None:
    assert begins(table, **base) == default
    assert begins(table, **base, **{field: True}) and not begins(table, **base, **{field: False})


def test_templates_write_their_own() -> None:
    assert not begins(CHAT, **USER) and not begins(TOKENIZE, **USER, add_special_tokens=True)


def test_ids_are_taken_as_they_are() -> None:
    assert not begins(COMPLETIONS, prompt=[1, 2], add_special_tokens=True)


def test_a_truncated_prompt_is_echoed_as_far_as_it_was_kept() -> None:
    body = {"prompt": "hello", "echo": True, "truncate_prompt_tokens": 3}
    plan = Completions().plan(BodyParser(COMPLETIONS).parse(json.dumps(body).encode()).body, RESOLVER, CONTEXTS)
    assert plan.jobs[0].echo == "llo"


def test_as_many_allowed_ids_as_a_message_holds() -> None:
    assert len(allowed_ids_of(list(range(MAX_ALLOWED_TOKEN_IDS)), 50_000)) == MAX_ALLOWED_TOKEN_IDS
    with pytest.raises(InvalidRequest, match="more than 1024"):
        allowed_ids_of(list(range(MAX_ALLOWED_TOKEN_IDS + 1)), 50_000)
