"""Ask an idle server for golden answers, one after another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from deploy.tools.traffic.golden import Golden
from deploy.tools.traffic.request_builder import RequestBuilder
from deploy.tools.traffic.target import Server
from deploy.tools.traffic.workloads.workload import Session
from shared.core.errors import ConfigError

MAX_SHOWN = 300
PLAIN = {"stream": None, "stream_options": None}
CLOSENESS = {"chat": {"logprobs": True, "top_logprobs": 2}, "completions": {"logprobs": 2}}


def ask(server: Server, builder: RequestBuilder, probe: Session, timeout_s: float) -> Golden:
    """Only our router is asked for logprobs: other servers may refuse."""
    turn = probe.turns[0]
    messages = (*probe.opening, ("user", turn.text))
    more: dict[str, Any] = dict(PLAIN)
    if builder.target.is_ours:
        more |= CLOSENESS[builder.api]
    status, body = server.post(builder.path, builder.body(messages, turn.max_tokens, more), timeout_s)
    try:
        choice = json.loads(body)["choices"][0]
        text = choice["message"]["content"] if builder.api == "chat" else choice["text"]
        return Golden(messages, turn.max_tokens, text or "", tuple(choice.get("token_ids") or ()), margins_of(choice))
    except (ValueError, LookupError, TypeError):
        shown = " ".join(body[:MAX_SHOWN].decode("utf-8", "replace").split())
        raise ConfigError(
            f"no golden answer from {server.url}{builder.path}: {status} {shown}; --golden 0 asks for none"
        ) from None


def margins_of(choice: dict[str, Any]) -> tuple[float, ...]:
    logprobs = choice.get("logprobs") or {}
    rows = [[top["logprob"] for top in entry["top_logprobs"]] for entry in logprobs.get("content") or ()]
    rows += [list(row.values()) for row in logprobs.get("top_logprobs") or ()]
    return tuple(margin(row) for row in rows)


def margin(logprobs: Sequence[float]) -> float:
    """Return the best logprob minus the second best. Two tokens of equal text share one entry: then return 0."""
    best = sorted(logprobs, reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else 0.0
