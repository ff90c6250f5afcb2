"""What the router's API costs before a request is one: from a body to its plan. A part of benchmarks.router."""

from __future__ import annotations

import json
from collections.abc import Callable

from router.api.answer.generation_plan import Contexts
from router.api.ask.resolve import Resolver
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT, Chat, ChatRequest
from router.text.hashlm import hash_text_model
from shared.config.settings.settings import LimitsConfig

REPEATS, CONTEXT = 200, 1 << 20


def bodies(cpu_s: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """From a body to a plan, without sockets: with fields that are served only, and with others beside them."""
    resolver = Resolver("hashlm", hash_text_model(), LimitsConfig())
    parser, contexts = BodyParser(CHAT), Contexts(CONTEXT, CONTEXT)
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there " * 5}]
    served = {"model": "hashlm", "messages": turns, "max_tokens": 50, "temperature": 0.7, "stream": True}
    more = served | {"user": "me", "tools": None, "surprise": {"a": [1, 2]}}
    return {
        "served_us": 1e6 * cpu_s(lambda: plans(parser, resolver, contexts, served)) / REPEATS,
        "others_us": 1e6 * cpu_s(lambda: plans(parser, resolver, contexts, more)) / REPEATS,
    }


def plans(parser: BodyParser[ChatRequest], resolver: Resolver, contexts: Contexts, body: dict[str, object]) -> None:
    raw = json.dumps(body).encode()
    for _ in range(REPEATS):
        Chat().plan(parser.parse(raw).body, resolver, contexts)
