"""Prints an answer to its end, whatever becomes of the router: python examples/resuming_client.py URL PROMPT"""

import json
import sys
import time
from collections.abc import Iterator, Mapping

import httpx

AGAIN = (429, 502, 503, 504)


def stream(url: str, body: dict, headers: Mapping[str, str] = {}, retries: int = 60) -> Iterator[dict]:
    """Yield each chunk once. An id counts when its event is whole: at the blank line."""
    token = place = ""
    for _ in range(retries):
        last = {"Last-Event-ID": f"{token}/{place}"} if place else {}
        try:
            with httpx.stream("POST", url, json=body | {"stream": True}, headers=headers | last, timeout=60) as answer:
                if answer.status_code not in AGAIN:
                    answer.raise_for_status()  # resume_mismatch is a 422: this stream can't be had again
                event: dict[str, str] = {}
                for line in answer.iter_lines():
                    name, _, value = line.partition(": ")
                    event[name] = value
                    if line:
                        continue
                    if event.get("data") == "[DONE]":
                        return
                    if "id" in event:  # events without one are errors and comments
                        first, slash, place = event["id"].rpartition("/")
                        token = first if slash else token
                        yield json.loads(event["data"])
                    elif "resume_mismatch" in event.get("data", ""):
                        raise RuntimeError(event["data"])
                    event = {}
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError("the stream could not be had to its end")


if __name__ == "__main__":
    for chunk in stream(f"{sys.argv[1]}/v1/completions", {"prompt": sys.argv[2], "max_tokens": 200}):
        print("".join(choice["text"] for choice in chunk["choices"]), end="", flush=True)
