"""Choose the nodes of an attempt: a hand-off pair, or one node alone.

both roles have nodes                  P -> D, which can reach each other
no prefill node, or all pairs broken   D alone
hand-off costs more than it saves      D alone: by measured cost, or for prompts up to a given length
no decode node                         P alone
prompt log-probabilities wanted        P alone, or D if there is no P: the scores must precede the first token
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from router.fleet.prompt_cost import MOST_LOCAL_TOKENS, Lacking, PendingWork, costs_less_on_decode
from router.fleet.registry import NO_NEEDS, Needs, RegisteredNode, Registry, fitting, not_held_back, of_role
from router.policy.interface import Picked, Policy, Wanted
from router.policy.least_load import prompt_tokens
from router.requests.journal import OpenRequest
from router.requests.pairs import Pairs
from shared.config.settings.router_settings import BY_COST, UNMEASURED_LOCAL_TOKENS
from shared.core.errors import AdapterMissing, NoNodes

NODES_AWAY_S = 2.0
NO_NODES = "no node can take requests now: they still start, or none is connected (GET /ready says which); try again"


@dataclass(frozen=True, slots=True)
class Placement:
    prefill: RegisteredNode | None
    decode: RegisteredNode | None
    is_alone: bool = False
    is_by_cost: bool = False  # whether a hand-off would cost more
    picks: tuple[Picked, ...] = ()


class Placer:
    """`local_tokens`: prompts up to this length are not handed over. With BY_COST the measured cost decides."""

    def __init__(self, registry: Registry, policy: Policy, local_tokens: int) -> None:
        self._registry = registry
        self._policy = policy
        self._is_by_cost = local_tokens == BY_COST
        self._local_tokens = UNMEASURED_LOCAL_TOKENS if self._is_by_cost else local_tokens
        self._had_nodes_at = -float("inf")
        self.pairs = Pairs()

    def place(
        self,
        wanted: Wanted,
        avoid: Collection[str] = (),
        most_tokens: int = 0,
        needs: Needs = NO_NEEDS,
        apart: Collection[str] = (),
        *,
        on_one: bool = False,
    ) -> Placement:
        """Choose a request's nodes. Raise NoNodes or AdapterMissing.

        - `avoid`: peers used only as a last resort, and then without a hand-off
        - `most_tokens`: prompt and longest answer; nodes that can't hold them are used only if no node can
        - `needs`: of both nodes
        - `apart`: peers used only if their role has no other node
        - `on_one`: no hand-off"""
        usable = self._able(wanted.now, most_tokens, needs)
        others = [node for node in usable if node.peer not in avoid] if avoid else usable
        prefills = without(of_role("prefill", others or usable), apart)
        decodes = without(of_role("decode", others or usable), apart)
        if not prefills and not decodes:
            raise NoNodes(NO_NODES)
        if prefills and (on_one or not decodes):
            picked = self._pick(prefills, wanted)
            return Placement(picked.node, None, picks=(picked,))
        if on_one:
            picked = self._pick(decodes, wanted)
            return Placement(None, picked.node, picks=(picked,))
        return self._pair(prefills if others else [], decodes, wanted)

    def _pick(self, nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        return self._policy.pick(not_held_back(nodes), wanted)

    def _pair(self, prefills: Sequence[RegisteredNode], decodes: Sequence[RegisteredNode], wanted: Wanted) -> Placement:
        """Pick the decode node first, then a prefill node that can hand requests to it.

        A prompt is short if at most `_local_tokens` of it are uncached on the decode node. Without BY_COST, the decode
        node runs a short prompt alone. With BY_COST, the decode node does so if no prefill node reaches it; else costs
        decide."""
        now, decode = wanted.now, self._pick(decodes, wanted)
        if not self._is_short(decode.node, wanted) and self._is_cut_off(decode.node, prefills, now):
            others = [node for node in decodes if self.pairs.reachable(fitting(prefills, node), node, now)]
            decode = self._pick(others, wanted) if others else decode
        is_alone = not self._is_by_cost and self._is_short(decode.node, wanted)
        partners = [] if is_alone else self.pairs.reachable(fitting(prefills, decode.node), decode.node, now)
        if not partners:
            return Placement(None, decode.node, picks=(decode,))
        return self._start(self._pick(partners, wanted), decode, wanted)

    def _is_short(self, decode: RegisteredNode, wanted: Wanted) -> bool:
        return wanted.missing(decode) <= self._local_tokens

    def _is_cut_off(self, decode: RegisteredNode, prefills: Sequence[RegisteredNode], now: float) -> bool:
        partners = fitting(prefills, decode) if len(self.pairs) else []
        return bool(partners) and not self.pairs.reachable(partners, decode, now)

    def _start(self, picked: Picked, picked_decode: Picked, wanted: Wanted) -> Placement:
        prefill, decode, now = picked.node, picked_decode.node, wanted.now
        both = Placement(prefill, decode, picks=(picked, picked_decode))
        num_tokens = wanted.missing(decode)
        if not self._is_by_cost or num_tokens > MOST_LOCAL_TOKENS:
            return both
        there, handoff_s = prefill.figures.prompts.speed(now), prefill.figures.prompts.handoff(now)
        if there is None or handoff_s is None:
            return both if num_tokens > self._local_tokens else Placement(None, decode, picks=(picked_decode,))
        waiting = prompt_tokens(decode)
        if not decode.has_room(num_tokens + waiting):
            return both
        here = decode.figures.prompts.speed_beside(there, now)
        before = PendingWork(prompt_tokens(prefill), prefill.report.num_running)
        beside = PendingWork(waiting, decode.report.num_running)
        lacking = Lacking(wanted.missing(prefill), num_tokens)
        if costs_less_on_decode(lacking, there, before, here, beside, handoff_s):
            return Placement(None, decode, is_by_cost=True, picks=(picked_decode,))
        return both

    def place_alone(self, request: OpenRequest, now: float, apart: Collection[str]) -> Placement:
        """Choose a node without our requests, else the node with the fewest sequences.

        Decode nodes are preferred: no other prompts wait there. `apart`: peers where another suspect runs alone."""
        able = self._able(now, request.asked.most_tokens, request.asked.needs)
        if not able:
            raise NoNodes(NO_NODES)
        nodes = without(without(able, request.avoid), apart)
        idle = [node for node in nodes if not node.ours.open_sequences and not node.ours.open_prompt_tokens]
        node = min(idle or nodes, key=lambda node: (node.ours.open_sequences, node.role != "decode", node.node_id))
        if node.role == "decode":
            return Placement(None, node, is_alone=bool(idle))
        return Placement(node, None, is_alone=bool(idle))

    def _able(self, now: float, most_tokens: int, needs: Needs) -> list[RegisteredNode]:
        usable = self._registry.usable(now)
        there = [node for node in usable if node.meets(needs)] if needs != NO_NEEDS else usable
        if usable and not there:
            if needs.adapter:
                raise AdapterMissing("no node that can take requests now has the adapter; try again")
            if needs.has_grammar and all(node.why_no_grammar for node in usable):
                raise NoNodes("no node that can take requests now follows grammars; try again")
            raise NoNodes("no node knows all parameters of this request: its version is older than the router's")
        if most_tokens <= self._registry.narrowest:
            return there
        return [node for node in there if node.hello.max_context >= most_tokens] or there

    def other_decodes(self, request: OpenRequest, among: Sequence[RegisteredNode], now: float) -> list[RegisteredNode]:
        asked, prefill = request.asked, request.attempt.prefill
        if prefill is None or not prefill.is_there:
            return []
        needs = asked.needs
        return [
            node
            for node in among
            if node is not request.attempt.decode
            and node.can_take(now)
            and node.peer not in request.avoid
            and node.hello.max_context >= asked.most_tokens
            and node.meets(needs)
            and self.pairs.reachable(fitting([prefill], node), node, now)
        ]

    def is_possible(self, now: float) -> bool:
        """Return whether a node was connected in the last NODES_AWAY_S: all nodes redial when the router's key
        changes."""
        if self._registry.is_anyone_there():
            self._had_nodes_at = now
        return now - self._had_nodes_at < NODES_AWAY_S


def without(nodes: Sequence[RegisteredNode], peers: Collection[str]) -> Sequence[RegisteredNode]:
    """Return the nodes without these peers; all nodes if none would remain."""
    return [node for node in nodes if node.peer not in peers] or nodes if peers else nodes
