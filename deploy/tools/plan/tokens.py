"""Tokenize simulated requests with made-up answers, so that prefix caches hit as in a real cluster."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from deploy.tools.traffic.workloads.driver import Messages
from deploy.tools.traffic.workloads.workload import WORDS
from router.text.chat.chat_prompt import chat_ids
from router.text.chat.conversation import Conversation
from router.text.chat.interface import TextModel
from shared.core.request import TokenIds


class SimTokens:
    """One model's tokens. An answer of n tokens is the beginning of a fixed text."""

    def __init__(self, text: TextModel) -> None:
        self._text = text

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # one object per command
    def prompt(self, messages: Messages) -> TokenIds:
        chat = Conversation([{"role": role, "content": content} for role, content in messages])
        return np.asarray(chat_ids(self._text, chat), np.int64)

    @functools.cached_property
    def _answer_ids(self) -> Sequence[int]:
        return self._text.tokenizer.encode(" ".join(WORDS), add_special=False)

    def answer(self, num_tokens: int) -> str:
        return " ".join(WORDS[i % len(WORDS)] for i in range(num_tokens))

    def answer_id(self, position: int) -> int:
        return self._answer_ids[position % len(self._answer_ids)]
