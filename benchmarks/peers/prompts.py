"""Prompts for the rows with drafts: chat and summaries that no head was trained on, and code written for this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.tools.head.prompts import OWN_PROMPTS, prompt_ids, read_kinds
from router.text.load import load_text_model

CODE = Path(__file__).with_name("code_prompts.jsonl")
KINDS = ("chat", "code", "summarising")

Prompts = Mapping[str, Sequence[Sequence[int]]]  # by kind: token ids, with the chat template


def draft_prompts(per_kind: int) -> Prompts:
    text, every = load_text_model("smollm2"), (*read_kinds(OWN_PROMPTS), *read_kinds(CODE))
    return {kind: [prompt_ids(text, prompt) for name, prompt in every if name == kind][:per_kind] for kind in KINDS}
