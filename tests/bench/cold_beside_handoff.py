"""How long a hand-off's pull waits beside copies of the cold tier: one stream for both, and one for each, in turns.

    python -m tests.bench.cold_beside_handoff [--rounds N] [--pages N] [--restores N]

    one stream     restore restore ... restore pull
    two streams    restore restore ... restore
                   pull

Pages are copied as production does it, with their digests. `restores` copies of `pages` pages each are launched, then
one pull of as many pages; the time is from its launch to its end. `alone`: no restore is under way.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import xxhash

from shared.device.streams import make_streams
from shared.engine.transfer_jobs import TransferJobs
from shared.kv.cold_store import ColdStore
from shared.model.hashlm.model import HashLM
from shared.node.assemble import CoreSizes, assemble_core
from shared.node.core import NodeCore
from shared.sched.settings import SchedSettings

PAGE_BYTES = 360 << 10  # of a small model: 30 layers, 3 heads of 64, 16 tokens, float32


def build() -> NodeCore:
    streams = make_streams("cpu", on_thread_start=lambda: torch.set_num_threads(1))
    return assemble_core(HashLM(), streams, SchedSettings(page_size=16, max_context=512), CoreSizes(20, 2))


class Pages:
    """What both kinds of copies move."""

    def __init__(self, num_pages: int) -> None:
        self.store = ColdStore(PAGE_BYTES, num_pages)
        self.pool = np.zeros((2 * num_pages, PAGE_BYTES), np.uint8)
        self.sent = np.ones((num_pages, PAGE_BYTES), np.uint8)
        self.filings = [self.store.add_page(bytes([index])) for index in range(num_pages)]
        for index, filing in enumerate(self.filings):
            self.store.store(filing, self.sent[index])

    def restore(self) -> None:
        for index, filing in enumerate(self.filings):
            self.store.load(filing.cold, filing.place, self.pool[index])

    def pull(self) -> None:
        first = len(self.filings)
        for index, page in enumerate(self.sent):
            np.copyto(self.pool[first + index], page)
            xxhash.xxh3_64_intdigest(self.pool[first + index].data)


def pull_ms(core: NodeCore, pages: Pages, restores: int, is_cold: bool) -> float:
    cold: TransferJobs[int, None] = TransferJobs(core.engine, is_cold=is_cold)
    pulls: TransferJobs[int, None] = TransferJobs(core.engine)
    for index in range(restores):
        cold.launch(index, pages.restore, "restore", after_newest_step=True)
    start = time.perf_counter()
    pulls.launch(0, pages.pull, "pull", after_newest_step=True)
    pulls.synchronize()
    took = 1e3 * (time.perf_counter() - start)
    while len(cold):
        cold.synchronize()
        cold.take_done()
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description="A pull beside copies of the cold tier")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--restores", type=int, default=6)
    args = parser.parse_args()
    core, pages = build(), Pages(args.pages)
    ways: dict[str, Callable[[], float]] = {
        "alone": lambda: pull_ms(core, pages, 0, is_cold=True),
        "one stream": lambda: pull_ms(core, pages, args.restores, is_cold=False),
        "two streams": lambda: pull_ms(core, pages, args.restores, is_cold=True),
    }
    took: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, measure in ways.items():
            took[way].append(measure())
    core.close()
    for way, values in took.items():
        print(f"{way:12} {statistics.median(values):7.1f} ms   {min(values):.1f} to {max(values):.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
