"""Prints an answer to its end, whatever becomes of the router: python examples/resuming_client.py URL PROMPT"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

AGAIN = (429, 502, 503, 504)
PAUSE_S = 0.5  # before the next try: a router that was killed needs a moment to start again


def stream(url: str, body: dict[str, Any], headers: dict[str, str], tries: int = 60) -> Iterator[dict[str, Any]]:
    """Yield each chunk once. An event counts when it is whole, at its blank line."""
    token = place = ""
    for _ in range(tries):
        seen = {"Last-Event-ID": f"{token}/{place}"} if place else {"X-Stream-Ids": "1"}
        try:
            with httpx.stream("POST", url, json=body | {"stream": True}, headers=headers | seen, timeout=60) as answer:
                if answer.status_code not in AGAIN:
                    answer.raise_for_status()  # a 422 is resume_mismatch: this answer can't be had again
                event: dict[str, str] = {}
                for line in answer.iter_lines():
                    name, _, event[name] = line.partition(": ")
                    if line or "data" not in event:
                        continue
                    if event["data"] == "[DONE]":
                        return
                    if "id" in event:
                        first, slash, place = event["id"].rpartition("/")
                        token = first if slash else token
                        yield json.loads(event["data"])
                    elif "invalid_request_error" in event["data"]:  # only errors have no id; others may pass
                        raise RuntimeError(event["data"])
                    event = {}
        except httpx.TransportError:
            pass
        time.sleep(PAUSE_S)
    raise RuntimeError("the answer could not be had to its end")


if __name__ == "__main__":
    for chunk in stream(f"{sys.argv[1]}/v1/completions", {"prompt": sys.argv[2], "max_tokens": 200}, {}):
        print("".join(choice["text"] for choice in chunk["choices"]), end="", flush=True)
