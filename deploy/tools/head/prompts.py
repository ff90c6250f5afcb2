"""Read the prompts of an evaluation: one {"kind": ..., "prompt": ...} per line."""

from __future__ import annotations

import json
from pathlib import Path

from router.text.chat.chat_prompt import chat_ids
from router.text.chat.conversation import Conversation
from router.text.chat.interface import TextModel
from shared.core.errors import ConfigError

OWN_PROMPTS = Path(__file__).with_name("held_out_prompts.jsonl")


def read_kinds(path: Path) -> list[tuple[str, str]]:
    """Return each line's (kind, prompt). Raise ConfigError for an invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [(str(raw["kind"]), str(raw["prompt"])) for raw in map(json.loads, filter(None, lines))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"can't read kinds and prompts from {path}: {error!r}") from error


def prompt_ids(text: TextModel, prompt: str) -> tuple[int, ...]:
    """Return a user message's ids in the chat template, as the API renders it."""
    return tuple(chat_ids(text, Conversation([{"role": "user", "content": prompt}])))
