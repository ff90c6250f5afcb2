"""Where tests of faults and deaths begin: two nodes, jobs whose prompts take several chunks, and how they ended."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from shared.core.sampling_params import SamplingParams
from shared.node.loop.node import Node
from shared.wire.messages import Grant, Installed, Key, Offer, Prebuilt, Ready
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.node_pair import Net, make_node

LONG = SamplingParams(max_tokens=12, temperature=0.0)
RELAY = (Offer, Grant, Ready, Prebuilt, Installed)  # a hand-off's messages, in order


def job(rid: int = 0, length: int = 70, sampling: SamplingParams = LONG) -> Job:
    """Another prompt for each `rid`."""
    rng = random.Random(rid)
    return Job(rid, tuple(rng.randrange(95) for _ in range(length)), sampling, rid + 7)


def pair(**changes: Any) -> tuple[Node, Node]:
    """A prefill and a decode node."""
    knobs = replace(CoreKnobs(chunk_size=32), **changes)
    return make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)


def linked(**changes: Any) -> tuple[Net, Node, Node]:
    p, d = pair(**changes)
    return Net([p, d]), p, d


def counters(node: Node) -> dict[str, float]:
    return node.ctx.metrics.counters()


def ends_of(net: Net, key: Key) -> list[tuple[str, str]]:
    """(reason, error code) of each end that the router was told."""
    return [(end.reason, end.error_code) for end in net.router.ends[key]]
