"""Chats are rendered as transformers renders them: templates of many models, conversations drawn by seed."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models

from router.text.chat import template_sandbox
from router.text.chat.chat_template import JinjaTemplate
from router.text.chat.control_tokens import ControlTokens
from router.text.chat.conversation import Conversation
from router.text.chat.interface import TextModel
from router.text.chat.normal_form import Renderer
from router.text.hashlm import HashTokenizer
from shared.core.errors import InvalidRequest
from tests.support.bodies.odd_histories import HISTORIES, TOOL, with_texts
from tests.support.bodies.rendered import chat_text

FOLDER = Path(__file__).parents[3] / "data" / "templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
NUM_CONVERSATIONS = 85
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TEXTS = (
    *("hi", "", " ", "What is 2 + 2?\nAnswer briefly.  ", "\n\n  def f(x):\n\treturn {'a': x}\n"),
    *("<think>one\ntwo</think>\n\nthree", "</think> alone", "<tool_response>\nno such\n</tool_response>"),
    *('quote " backslash \\ braces {{ x }} {% if %} &amp; <b>', "null None true False 0"),
    *("déjà vu, ñandú, e\u0301 ﬁ ﷺ", "中文字符，日本語。한국어", "𠀀𠀁 \ue000\uf8ff \U000f0000 \U0010fffd"),
    *("🦜👩‍👩‍👧‍👦 \U0001d518 \u200b\u200d\u202e\ufeff", "\u2028line\u2029 \x85 \x0b \x1f \xa0 end"),
)
KWARGS: dict[str, tuple[Any, ...]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False, "elaborate"),
    "reasoning_effort": ("low", "high", None),
    "thinking_budget": (0, 512),
    "unknown_é": (1.5,),
}


def conversation(rng: random.Random) -> Conversation:
    """One of the histories with odd texts, tools, documents and options."""

    def text() -> str:
        return " ".join(rng.choices(TEXTS, k=rng.randint(1, 2)))

    messages = with_texts(rng.choice(list(HISTORIES.values())), text)
    continues = messages[-1]["role"] == "assistant" and rng.random() < 0.7
    return Conversation(
        messages,
        tools=rng.choice([None, [], [TOOL], [TOOL, odd_tool(rng)]]),
        documents=rng.choice([None, None, None, [], [{"title": text(), "text": text(), "doc_id": "0"}]]),
        kwargs={name: rng.choice(values) for name, values in KWARGS.items() if rng.random() < 0.25},
        add_generation_prompt=not continues and rng.random() < 0.8,
        continue_final_message=continues,
    )


def odd_tool(rng: random.Random) -> dict[str, Any]:
    more = ({}, {"enum": ["a", "ü"]}, {"default": None}, {"items": {"type": "number"}})
    kinds = ("string", "integer", "array", "object")
    arguments = {kind: {"type": kind, "description": rng.choice(TEXTS)} | rng.choice(more) for kind in kinds}
    function = {"name": "résumé", "description": rng.choice(TEXTS), "strict": rng.choice((True, None))}
    return {"type": "function", "function": function | {"parameters": {"type": "object", "properties": arguments}}}


def as_hugging_face_gets_it(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with tool arguments as mappings, for a renderer that leaves this to its callers."""
    copied = json.loads(json.dumps(messages))
    for call in (call for message in copied for call in message.get("tool_calls") or []):
        given = (call["function"]["arguments"] or "").strip() or "null"
        try:
            parsed = json.loads(given, strict=False)
        except ValueError:
            parsed = call["function"]["arguments"]
        call["function"]["arguments"] = parsed if isinstance(parsed, dict) else {"arguments": parsed} if parsed else {}
    return copied


class OneMoment(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:
        return datetime(2026, 2, 3, 4, 5, 6)


@pytest.fixture(autouse=True)
def one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "datetime", OneMoment)
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", OneMoment)


@pytest.fixture(autouse=True)
def no_other_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what the templates make of the conversation itself."""
    monkeypatch.setattr(Renderer, "_forms", lambda renderer, native: iter(()))


def hugging_face(sources: dict[str, str]) -> transformers.PreTrainedTokenizerFast:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(models.BPE()), **TOKENS)
    tokenizer.chat_template = sources
    return tokenizer


def theirs(tokenizer: transformers.PreTrainedTokenizerFast, chat: Conversation) -> str | None:
    """None: refused."""
    try:
        rendered = tokenizer.apply_chat_template(
            as_hugging_face_gets_it(chat.messages),
            tools=chat.tools,
            documents=chat.documents,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tokenize=False,
            **chat.kwargs,
        )
    except Exception:  # templates raise what they like
        return None
    return str(rendered)


def ours(model: TextModel, chat: Conversation) -> str | None:
    try:
        return chat_text(model, chat)
    except InvalidRequest:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name: str) -> None:
    sources = {"default": (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")}
    tokenizer = hugging_face(sources)
    model = TextModel(HashTokenizer(), JinjaTemplate(sources, TOKENS, {}), ControlTokens(TOKENS.values()))
    num_rendered = 0
    for seed in range(NUM_CONVERSATIONS):
        chat = conversation(random.Random(seed))
        expected = theirs(tokenizer, chat)
        assert ours(model, chat) == expected, f"seed {seed}: {chat}"
        num_rendered += expected is not None
    assert num_rendered > 5
