"""Ask a running cluster for answers with token ids, over its API."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deploy.router_http import RouterHttp
from deploy.router_url import Url
from deploy.tools.prove.cases import Case
from deploy.tools.prove.compare import Answer, AnswerChoice
from shared.core.errors import ConfigError

TIMEOUT_S = 600.0
HEARTBEAT_S = 0.6  # the wait for the nodes' next report
MAX_SHOWN = 500


class ProveClient:
    """`api_key`: "" if the cluster needs none."""

    def __init__(self, url: Url, max_tokens: int, api_key: str = "", ca: Path | None = None) -> None:
        self._http = RouterHttp(url, api_key, ca, timeout_s=TIMEOUT_S)
        self._max_tokens = max_tokens
        self.cached_tokens = 0  # of all prompts so far
        try:
            self.model = str(json.loads(self._call("GET", "/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"the server at {url} names no model: is it a router?") from None

    def one_by_one(self, cases: Sequence[Case]) -> list[Answer]:
        return [self.ask(case) for case in cases]

    def together(self, cases: Sequence[Case]) -> list[Answer]:
        """Send all requests at once, so that they share batches."""
        with ThreadPoolExecutor(len(cases)) as pool:
            return list(pool.map(self.ask, cases))

    def ask(self, case: Case) -> Answer:
        fixed = {"max_tokens": self._max_tokens, "ignore_eos": True, "return_token_ids": True, "logprobs": 2}
        body = {"model": self.model, "prompt": case.prompt, **fixed, **case.fields}
        answer = json.loads(self._call("POST", "/v1/completions", body))
        self.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        in_order = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        return tuple(choice_of(choice) for choice in in_order)

    def handed_over(self) -> int:
        """Return the number of installed hand-offs, by the nodes' last heartbeats."""
        time.sleep(HEARTBEAT_S)
        lines = self._call("GET", "/metrics").decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("baton_handoffs_total{"))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        status, data = self._http.require_answer(method, path, body)
        if status != 200:
            raise ConfigError(f"{path}: {status} {data[:MAX_SHOWN].decode(errors='replace')}")
        return data


def choice_of(choice: dict[str, Any]) -> AnswerChoice:
    tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
    return AnswerChoice(tuple(choice["token_ids"]), tuple(map(margin, tops)), tuple(choice.get("prompt_token_ids", ())))


def margin(top: dict[str, float]) -> float | None:
    """Return the best logprob minus the second best.

    Return None for a single entry: two tokens of equal text share it, so their margin is unknown.
    """
    best = sorted(top.values(), reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else None
