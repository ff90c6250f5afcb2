"""Small configurations, looked at exhaustively (I10): two nodes of eight pages, three requests that do not fit, and
every order of the first few things that can happen. Whatever came first, a fair run then ends them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from shared.node.loop.node import Node
from shared.wire.messages import Key
from tests.support.cores.core_rig import CoreKnobs, retract_somebody
from tests.support.cores.scripted_core import job
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node, name_of, sibling

DEPTH, QUICK_DEPTH = 5, 3
PAGES, PAGE_SIZE = 8, 4
BUDGET = 400  # rounds of both nodes; the longest run needs about a third of it
GROWING = (10, 12)  # tokens of prompt and answer: 3 pages at first, 6 in the end; three of them want 18
LARGE = (20, 6)


@dataclass
class Small:
    """p hands two requests over, one of two sequences; d has a prompt of its own, which arrived in between."""

    prefill: Node
    decode: Node
    net: Net
    wanted: dict[Key, list[int]]

    def moves(self) -> dict[str, Callable[[], object]]:
        return {
            "p": lambda: self.net.tick(name_of(self.prefill)),
            "d": lambda: self.net.tick(name_of(self.decode)),
            "retract": self.retract,
        }

    def retract(self) -> None:
        """Somebody at the decode node, running or granted: the youngest, as the scheduler would."""
        scheduler = self.decode.ctx.core.scheduler
        granted = sorted(scheduler.queues.granted.values(), key=lambda req: req.arrival)
        if granted:
            scheduler.queues.retract(granted[-1])
        else:
            retract_somebody(self.decode.ctx.core, self.net.rng)


def build(overlap: bool, shape: tuple[int, int], ungranted: int) -> Small:
    knobs = CoreKnobs(
        page_size=PAGE_SIZE, num_pages=PAGES + 1, chunk_size=8, overlap=overlap, max_running=4,
        prefix_cache=overlap, max_ungranted_pages=ungranted,
    )  # fmt: skip
    p, d = make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)
    net = Net([p, d])
    jobs = [job(rid, *shape) for rid in range(3)]
    keys = [net.generate(p, jobs[0], d), net.generate(d, jobs[1]), net.generate(p, jobs[2], d, num_sequences=2)]
    wanted = {key: expected(one) for key, one in zip(keys, jobs, strict=True)}
    wanted[sibling(keys[2], 1)] = expected(jobs[2], 1)
    return Small(p, d, net, wanted)


def orders(depth: int) -> Iterator[tuple[str, ...]]:
    yield from itertools.product(("p", "d", "retract"), repeat=depth)


CONFIGS = [(True, GROWING, 1 << 30), (False, GROWING, 4), (True, LARGE, 4), (False, LARGE, 1 << 30)]


@pytest.mark.rule("I10")
@pytest.mark.parametrize("depth", [QUICK_DEPTH, pytest.param(DEPTH, marks=pytest.mark.long)])
@pytest.mark.parametrize("config", CONFIGS, ids=["overlap", "plain capped", "overlap capped large", "plain large"])
def test_every_order_of_the_first_moves_ends(config: tuple[bool, tuple[int, int], int], depth: int) -> None:
    for order in orders(depth):
        small = build(*config)
        moves = small.moves()
        for move in order:
            moves[move]()
        small.net.run(budget=BUDGET)
        for key, stream in small.wanted.items():
            assert small.net.router.ends[key], f"{key} never ended after {order}"
            assert small.net.router.streams[key] == stream, f"{key} after {order}"
        assert_clean(small.prefill, small.decode)


def test_the_requests_do_not_fit_together() -> None:
    """Else there would be nothing to see."""
    small = build(*CONFIGS[0])
    small.net.run(budget=BUDGET)
    waited = [small.decode.ctx.core.queues.counters.retractions, len(small.net.kept)]
    assert any(waited) or any(type(m).__name__ == "Wait" for _, _, m in small.net.seen)
