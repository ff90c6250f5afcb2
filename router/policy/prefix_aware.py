"""The node that has to compute least: of this prompt, behind the prompts that wait there.

Decode nodes are compared by what runs there; of those with about as little, the one with most of the prompt cached is
sent least. What is cached counts where it is at least half of the prompt: else a preamble that all prompts share would
keep them all where it was seen first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from router.policy.interface import Picked, Reason, Wanted
from router.policy.least_load import least_picked, lowest, prompt_tokens, sequences
from router.registry import RegisteredNode

CLOSE = 1.25  # costs that differ by no more are alike: what is measured is not as exact
MORE_SEQUENCES = 1.25  # that a decode node may have beside the least busy one, and one more


class PrefixAware:
    """A node with room for what it lacks of the request's KV comes before one without."""

    reads_caches = True

    def pick(self, nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        if len(nodes) == 1:
            return Picked(nodes[0], Reason.ONLY)
        saved = {node.peer: counted(wanted.cached(node), wanted.num_tokens) for node in nodes}
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
    """Return those that begin to decode soonest: in seconds where all of them are measured, else by tokens."""
    tokens = [prompt_tokens(node) + wanted.num_tokens - saved[node.peer] for node in nodes]
    speeds = [speed for node in nodes if (speed := node.prompts.speed(wanted.now)) is not None]
    costs: list[float] = list(tokens)
    if len(speeds) == len(nodes):
        costs = [speed.seconds(count) for speed, count in zip(speeds, tokens, strict=True)]
    most = CLOSE * min(costs)
    return [node for node, cost in zip(nodes, costs, strict=True) if cost <= most]


def least_busy(nodes: Sequence[RegisteredNode], saved: dict[str, int], wanted: Wanted) -> list[RegisteredNode]:
    """Return those with the fewest sequences; with nearly as few, if they have more of the prompt."""
    least = min(map(sequences, nodes))
    near = [node for node in nodes if sequences(node) <= MORE_SEQUENCES * least + 1 and saved[node.peer]]
    return near or list(lowest(lowest(nodes, sequences), prompt_tokens))


def tie(nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
    """Where a client names itself or its session, its requests meet again: highest random weight, so that routers
    agree without a word and a node that comes or goes moves few of them."""
    if not wanted.affinity or len(nodes) == 1:
        return least_picked(nodes)
    return Picked(max(nodes, key=lambda node: weight(wanted.affinity, node.node_id)), Reason.AFFINITY)


def weight(affinity: str, node_id: str) -> bytes:
    return hashlib.blake2b(f"{node_id}\n{affinity}".encode(errors="surrogatepass"), digest_size=8).digest()
