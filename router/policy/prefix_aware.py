"""Pick the node with the least to compute: this prompt's uncached part, and the prompts waiting before it.

docs/placement.md gives the other rules and their reasons.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import attrgetter

from router.fleet.prompt_cost import speeds_of
from router.fleet.registry import RegisteredNode
from router.policy.interface import Picked, Reason, Wanted
from router.policy.least_load import least_picked, lowest, prompt_tokens, weighted_sequences

CLOSE = 1.25  # costs within this ratio count as equal: measurements are not more exact
MORE_PICKED = 1.25  # a node is passed over if its past picks exceed this * (equal nodes' mean) + 1
MORE_SEQUENCES = 1.25  # limit on a decode node's sequences: this * (the least busy node's number) + 1


class PrefixAware:
    """Nodes with room for the request's uncached KV come first."""

    reads_caches = True

    def pick(self, nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        if len(nodes) == 1:
            return Picked(nodes[0], Reason.ONLY)
        saved = {node.peer: counted(wanted.cached(node, arriving=True), wanted.num_tokens) for node in nodes}
        with_room = [node for node in nodes if node.has_room(wanted.num_tokens - saved[node.peer])]
        left = with_room or nodes
        best = cheapest if left[0].role == "prefill" else least_busy
        close = best(left, saved, wanted)
        if max(saved[node.peer] for node in close) > min(saved[node.peer] for node in nodes):
            warmest = lowest(close, lambda node: -saved[node.peer])
            return Picked(tie(warmest, wanted).node, Reason.PREFIX)
        return tie(close, wanted)


def counted(cached: int, num_tokens: int) -> int:
    return cached if 2 * cached >= num_tokens else 0


def cheapest(nodes: Sequence[RegisteredNode], saved: dict[str, int], wanted: Wanted) -> list[RegisteredNode]:
    """Return the nodes that finish the prompt soonest, compared by seconds if all are measured, else by tokens and
    slowness."""
    tokens = [prompt_tokens(node) + wanted.num_tokens - saved[node.peer] for node in nodes]
    speeds = speeds_of([node.figures.prompts for node in nodes], wanted.now)
    costs = [node.weight * count for node, count in zip(nodes, tokens, strict=True)]
    if speeds is not None:
        costs = [speed.seconds(count) for speed, count in zip(speeds, tokens, strict=True)]
    most = CLOSE * min(costs)
    return [node for node, cost in zip(nodes, costs, strict=True) if cost <= most]


def least_busy(nodes: Sequence[RegisteredNode], saved: dict[str, int], wanted: Wanted) -> list[RegisteredNode]:
    """Return the nodes with cached tokens and nearly the fewest sequences, else the least busy nodes."""
    least = min(map(weighted_sequences, nodes))
    near = [node for node in nodes if weighted_sequences(node) <= MORE_SEQUENCES * least + 1 and saved[node.peer]]
    return near or list(lowest(lowest(nodes, weighted_sequences), prompt_tokens))


def tie(nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
    """Choose between equal nodes.

    Highest-random-weight hashing makes routers agree without messages, and moves few requests when nodes change."""
    if len(nodes) == 1:
        return least_picked(nodes)
    if wanted.affinity:
        return Picked(max(nodes, key=lambda node: weight(wanted.affinity, node.node_id)), Reason.AFFINITY)
    beginning = wanted.beginning(min(nodes, key=attrgetter("node_id"))).hex()  # the same node on all routers
    if not beginning:
        return least_picked(nodes)
    most = MORE_PICKED * sum(node.ours.dispatched for node in nodes) / len(nodes) + 1
    even = [node for node in nodes if node.ours.dispatched <= most]  # if beginnings are few, hashing is uneven
    return Picked(max(even, key=lambda node: weight(beginning, node.node_id)), Reason.MEETING)


def weight(name: str, node_id: str) -> bytes:
    return hashlib.blake2b(f"{node_id}\n{name}".encode(errors="surrogatepass"), digest_size=8).digest()
