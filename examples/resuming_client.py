"""Print an answer to its end, even if routers die: python examples/resuming_client.py URL[,URL...] PROMPT"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

AGAIN = (429, 502, 503, 504)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # the pauses between tries


def pause_s(failures: int, retry_after: str) -> float:
    """Return the server's Retry-After plus a random pause that doubles with each failure.

    Without randomness, all clients of a lost router would return together."""
    asked = float(retry_after) if retry_after.isdecimal() else 0.0
    return asked + random.uniform(0.5, 1.0) * min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures, 10))


def lines(answer: httpx.Response) -> Iterator[str]:
    """Yield the lines that line feeds end. `iter_lines` also splits at U+2028 and others, which JSON may hold."""
    rest = b""
    for piece in answer.iter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in whole)


def stream(
    url: str | Sequence[str], body: dict[str, Any], headers: dict[str, str], tries: int = 60
) -> Iterator[dict[str, Any]]:
    """Yield each chunk once. A blank line ends an event.

    `url`: the endpoint's URL, or the URLs of several routers that share a key file. After a failure the next router is
    asked. `tries`: the limit of failures in a row.
    """
    urls = [url] if isinstance(url, str) else list(url)
    token = place = ""
    failures = asked = 0
    while failures < tries:
        seen, retry_after = {"Last-Event-ID": f"{token}/{place}"} if place else {"X-Stream-Ids": "1"}, ""
        try:
            at = urls[asked % len(urls)]
            with httpx.stream("POST", at, json=body | {"stream": True}, headers=headers | seen, timeout=60) as answer:
                if answer.status_code in AGAIN:
                    retry_after = answer.headers.get("Retry-After", "")
                else:
                    answer.raise_for_status()  # 422 means resume_mismatch: this answer can't be reproduced
                event: dict[str, str] = {}
                for line in lines(answer):
                    name, _, event[name] = line.partition(": ")
                    if line or "data" not in event:
                        continue
                    if event["data"] == "[DONE]":
                        return
                    if "id" in event:
                        first, slash, place = event["id"].rpartition("/")
                        token = first if slash else token
                        failures = 0
                        yield json.loads(event["data"])
                    # An event without an id is an error. After errors of other types, ask again.
                    elif "invalid_request_error" in event["data"]:
                        raise RuntimeError(event["data"])
                    event = {}
        except httpx.TransportError:
            pass
        asked += 1
        time.sleep(pause_s(failures, retry_after))
        failures += 1
    raise RuntimeError("the answer could not be read to its end")


if __name__ == "__main__":
    routers = [f"{base}/v1/completions" for base in sys.argv[1].split(",")]
    for chunk in stream(routers, {"prompt": sys.argv[2], "max_tokens": 200}, {}):
        print("".join(choice["text"] for choice in chunk["choices"]), end="", flush=True)
