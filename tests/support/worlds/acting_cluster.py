"""Simulate a cluster whose nodes change roles, to try `baton plan act`.

A moving node takes no new requests, finishes the others, is away for `restart_s`, and returns with an empty cache.
Real nodes, unlike these, hand over requests that last too long.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from deploy.tools.plan.act.balance import DECODE, Balancer, ClusterLook, NodeLook, RoleMove, Totals
from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import Profile, StepShape
from deploy.tools.plan.sim_cluster import SimCluster, SimNode
from deploy.tools.plan.tokens import SimTokens
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.workloads.driver import LoadRequest
from router.fleet.leaving import By, Leaving
from shared.core.request import RequestState
from shared.core.states import NodeState
from shared.sched.steps.events import Emitted, Ended

PERIOD_S = 2.0


@dataclass(slots=True)
class Counts:
    arrived: int = 0
    ended: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    gaps: int = 0
    gaps_s: float = 0.0

    def totals(self) -> Totals:
        return Totals(self.arrived, self.ended, self.prompt_tokens, self.output_tokens, self.gaps, self.gaps_s)


class ActingCluster(SimCluster):
    """`moves`: (time, move) for each begun change of role."""

    def __init__(
        self, layout: ClusterLayout, profile: Profile, tokens: SimTokens, balancer: Balancer, restart_s: float
    ) -> None:
        super().__init__(layout, profile, tokens)
        self._balancer = balancer
        self._restart_s = restart_s
        self._leaving: list[RoleMove] = []
        self._away: set[str] = set()
        self._lives = 1
        self._counts = Counts()
        chunk = layout.chunk_size
        shape = StepShape(chunk, 1, pairs=chunk * (chunk + 1) // 2)
        self._token_s = self._path.prompt_stretch * profile.node(layout.cores).alone.seconds(shape) / chunk
        self.moves: list[tuple[float, RoleMove]] = []
        self._at(PERIOD_S, self._look)

    def look(self) -> ClusterLook:
        open_ = self._open.values()
        return ClusterLook(
            at=self.now,
            nodes=tuple(look_at_node(node) for name, node in self._by_id.items() if name not in self._away),
            totals=self._counts.totals(),
            token_s=self._token_s,
            waiting_tokens=sum(one.record.prompt_tokens for one in open_ if one.waits_for_prefill),
            not_decoding=len(open_) - sum(map(num_running, self.nodes)),
            rows=self._profile.max_running,
        )

    def _look(self) -> None:
        for move in self._balancer.see(self.look()):
            self._begin(move)
        for move in [move for move in self._leaving if is_idle(self._by_id[move.node])]:
            self._leaving.remove(move)
            self._away.add(move.node)
            self._at(self.now + self._restart_s, functools.partial(self._come_back, move))
        self._at(self.now + PERIOD_S, self._look)

    def _begin(self, move: RoleMove) -> None:
        self.moves.append((self.now, move))
        self._by_id[move.node].node.leaving = Leaving(By.NODE)
        self._leaving.append(move)

    def _come_back(self, move: RoleMove) -> None:
        self._lives += 1
        number = self.nodes.index(self._by_id[move.node])
        self.nodes[number] = self._by_id[move.node] = self._make_node(move.role, number, move.node, self._lives)
        self._away.remove(move.node)

    # ---- counting

    def _dispatch(self, asked: LoadRequest, record: RequestRecord) -> None:
        super()._dispatch(asked, record)
        if record.status == 200:
            self._counts.arrived += 1
            self._counts.prompt_tokens += record.prompt_tokens

    def _emitted(self, event: Emitted) -> None:
        super()._emitted(event)
        open_ = self._open.get(event.key)
        if open_ is None or len(open_.record.at) != event.first_pos + 1:
            return
        self._counts.output_tokens += 1
        if event.first_pos:
            self._counts.gaps += 1
            self._counts.gaps_s += open_.record.at[-1] - open_.record.at[-2]

    def _ended(self, node: SimNode, event: Ended) -> None:
        num_open = len(self._open)
        super()._ended(node, event)
        self._counts.ended += num_open - len(self._open)


def look_at_node(node: SimNode) -> NodeLook:
    seen = node.node
    state = NodeState.DRAINING if seen.is_draining else NodeState.READY
    return NodeLook(seen.node_id, seen.role, state, str(seen.hello.epoch), seen.ours.open_sequences)


def num_running(node: SimNode) -> int:
    requests = node.timed.scheduler.queues.requests.values() if node.node.role == DECODE else ()
    return sum(req.state is RequestState.RUNNING for req in requests)


def is_idle(node: SimNode) -> bool:
    return not node.timed.scheduler.queues.requests and not node.offers
