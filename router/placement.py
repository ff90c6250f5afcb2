"""Which nodes run a request: the hand-off pair, or one node alone. Knows nothing of messages.

prefill and decode node there          P -> D
short prompt, or no prefill node       D alone
no decode node                         P alone
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from router.policy.interface import Policy
from router.registry import RegisteredNode, Registry, fitting
from shared.core.errors import AdapterMissing, NoNodes

NODES_AWAY_S = 2.0


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: RegisteredNode | None
    decode: RegisteredNode | None


class Placer:
    """`local_tokens`: prompts up to this long are not worth a hand-off."""

    def __init__(self, registry: Registry, policy: Policy, local_tokens: int) -> None:
        self._registry = registry
        self._policy = policy
        self._local_tokens = local_tokens
        self._had_nodes_at = -float("inf")

    def place(
        self, num_tokens: int, now: float, avoid: Collection[str] = (), most_tokens: int = 0, adapter: str = ""
    ) -> Placement:
        """`avoid`: peers that get it only if there is no other node, and then without a hand-off. `most_tokens`: prompt
        and longest answer; nodes that say they can't hold so many are left out, unless all do. `adapter`: a digest;
        nodes without it are left out."""
        there = [node for node in self._registry.usable(now) if not adapter or node.has_adapter(adapter)]
        if not there and self._registry.usable(now):
            raise AdapterMissing("no node that can take requests now has the adapter; try again")
        usable = [node for node in there if node.hello.max_context >= most_tokens] or there
        others = [node for node in usable if node.peer not in avoid]
        prefills = [node for node in others or usable if node.role == "prefill"]
        decodes = [node for node in others or usable if node.role == "decode"]
        if not decodes:
            if not prefills:
                raise NoNodes("no node can take requests now; try again")
            return Placement(prefill=self._policy.pick(prefills), decode=None)
        decode = self._policy.pick(decodes)
        partners = fitting(prefills, decode) if num_tokens > self._local_tokens and others else []
        return Placement(prefill=self._policy.pick(partners) if partners else None, decode=decode)

    def is_possible(self, now: float) -> bool:
        """There are nodes, or were just now: when a router's own key changes all of them dial it anew."""
        if self._registry.usable(now):
            self._had_nodes_at = now
        return now - self._had_nodes_at < NODES_AWAY_S
