"""What routing by prefix costs a router: `python -m benchmarks.routers.prefix_index`. One core, no sockets, no torch.

memory      of a million pages, spread over the nodes, as messages bring them
look-up     how much of one prompt each of the nodes has, once the prompt's identities exist
identities  of a prompt of 8,192 tokens, made once for each request
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable

import msgspec

from router.fleet.prefix_index import MAX_PAGES, PageIndex, PromptPages
from shared.wire.codec import decode, encode
from shared.wire.messages import PROTOCOL_VERSION, CacheEvents, Fingerprint, Hello

NUM_NODES, NUM_PAGES, BATCH = 100, 1_000_000, 2_000
PROMPT_TOKENS, PAGE_SIZE, REPEATS = 8_192, 16, 200
FINGERPRINT = Fingerprint(PROTOCOL_VERSION, 1, "m", "w", "int", PAGE_SIZE, "l", "none", "b", "none")
HELLO = Hello("prefill", "a", 1, "", FINGERPRINT, 1, 1, "h", [], 1, [])


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def median_us(work: Callable[[], object]) -> float:
    took = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        took.append(1e6 * (time.perf_counter() - started))
    return round(statistics.median(took), 1)


def filled(rng: random.Random) -> list[PageIndex]:
    """Indices of all nodes, by messages that came over the wire."""
    indices = [PageIndex() for _ in range(NUM_NODES)]
    for number in range(NUM_PAGES // BATCH):
        index = indices[number % NUM_NODES]
        names = [rng.randbytes(16) for _ in range(BATCH)]
        message = decode(encode(CacheEvents("a", 1, index.seq + 1, index.seq == 0, [], names)))
        assert isinstance(message, CacheEvents) and index.take_events(message)
    return indices


def measure() -> dict[str, object]:
    assert NUM_PAGES <= MAX_PAGES
    rng = random.Random(7)
    gc.collect()
    before = resident_bytes()
    indices = filled(rng)
    gc.collect()
    held_mb = (resident_bytes() - before) / 1e6
    found: dict[str, object] = {"pages": sum(map(len, indices)), "nodes": NUM_NODES, "memory_mb": round(held_mb, 1)}
    prompt = [rng.randrange(32_000) for _ in range(PROMPT_TOKENS)]
    pages = PromptPages(prompt, "", 0)
    names = pages.names(HELLO)
    for index in indices:
        index.take_events(CacheEvents("a", 1, index.seq + 1, False, [], names[rng.randrange(len(names)) :]))
    found["look_up_us"] = median_us(lambda: [pages.cached_tokens(index, HELLO) for index in indices])
    for name, lookahead in (("identities_us", 0), ("identities_with_drafts_us", 1)):
        hello = msgspec.structs.replace(HELLO, key_lookahead=lookahead)
        found[name] = median_us(lambda hello=hello: PromptPages(prompt, "", 0).names(hello))  # type: ignore[misc]
    return found


if __name__ == "__main__":
    print(json.dumps(measure()))
