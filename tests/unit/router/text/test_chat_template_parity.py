"""Chats are rendered as transformers renders them: templates of many models, conversations drawn by seed."""

from __future__ import annotations

import random
from datetime import datetime
from pathlib import Path

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
from tests.support.bodies.chat_cases import as_hugging_face_gets_it, conversation
from tests.support.bodies.rendered import chat_text

FOLDER = Path(__file__).parents[3] / "data" / "templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
NUM_CONVERSATIONS = 85
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


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
