"""Decide how many nodes each role gets, and which nodes move. Pure.

A role's pressure is the work that arrives for it, divided by its nodes' capacity. At 1 the role is full.

  `prefill`  (arriving prompt tokens per second + waiting tokens / CLEAR_S) x seconds per token / (FULL_SHARE x nodes).
  `decode`   (arriving requests per second + requests that do not decode yet / CLEAR_S) x tokens per answer x TPOT
            / (FULL_SHARE x rows), by Little's law; or TPOT / TPOT objective, if this value is larger.

The pressures use arriving requests, not served ones: full prefill nodes may be why decode nodes are idle. When a role
is full, the balancer chooses the split whose fuller role has the lowest pressure. Nodes move only if, over a whole
window, this split lowers that pressure by at least the share GAIN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.core.states import NodeState

PREFILL, DECODE = "prefill", "decode"
OTHER = {PREFILL: DECODE, DECODE: PREFILL}
FULL_SHARE = 0.8  # share of a node's time or rows that counts as full
CLEAR_S = 60.0  # time in which waiting work should be done
# Late tokens raise the demand at most by this factor: they hardly show how many nodes are missing.
MOST_TIMES = 1.5
GAIN = 0.15
LONGEST_WINDOW = 4.0  # as a multiple of the first window
WHOLE = 0.9  # a window counts as whole at this share of its length, since looks are not exactly periodic


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """`tpot_s`: the TPOT objective, or infinity. `window_s`: the time of observation before a move.

    `away_s`: the longest wait for a moving node. `calm_s`: if a node moves back within this time, the load is assumed
    to swing, and the window gets longer. `least`: the fewest nodes of each role.
    """

    tpot_s: float = float("inf")
    window_s: float = 15.0
    away_s: float = 300.0
    calm_s: float = 90.0
    least: int = 1


@dataclass(frozen=True, slots=True)
class NodeLook:
    """`streams`: open requests."""

    name: str
    role: str
    state: NodeState
    epoch: str
    streams: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Only differences between two looks have a meaning."""

    arrived: float = 0.0
    ended: float = 0.0
    prompt_tokens: float = 0.0  # tokens of all arrived prompts, computed or waiting
    output_tokens: float = 0.0
    gaps: float = 0.0  # number of waits between two tokens
    gaps_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterLook:
    """`token_s`: seconds per prompt token on one prefill node; 0.0 while unknown."""

    at: float
    nodes: tuple[NodeLook, ...]
    totals: Totals
    token_s: float
    waiting_tokens: float  # prompt tokens not yet computed
    not_decoding: float  # open requests without a running row
    rows: float  # request rows of one decode node

    def of(self, role: str) -> list[NodeLook]:
        return [node for node in self.nodes if node.role == role and node.state is NodeState.READY]


@dataclass(frozen=True, slots=True)
class Demand:
    """How many nodes of each role the work would fill."""

    prefill: float
    decode: float

    def __str__(self) -> str:
        return f"work for {self.prefill:.1f} prefill and {self.decode:.1f} decode nodes"

    def pressure(self, num_prefill: int, num_decode: int) -> float:
        return max(self.prefill / num_prefill, self.decode / num_decode)

    def best(self, num_nodes: int, least: int) -> int:
        return min(range(least, num_nodes - least + 1), key=lambda num: self.pressure(num, num_nodes - num))

    def exceeds(self, num_nodes: int, least: int) -> bool:
        """Return whether a role is full under every split of these nodes."""
        least = max(1, least)
        if num_nodes < 2 * least:
            return False
        num_prefill = self.best(num_nodes, least)
        return self.pressure(num_prefill, num_nodes - num_prefill) >= 1.0


@dataclass(frozen=True, slots=True)
class RoleMove:
    node: str
    role: str
    epoch: str  # before the move
    why: str


def demand_between(first: ClusterLook, last: ClusterLook, tpot_s: float) -> Demand:
    """`tpot_s`: the TPOT objective."""
    seconds, old, new = last.at - first.at, first.totals, last.totals
    prompt_rate = (new.prompt_tokens - old.prompt_tokens) / seconds + last.waiting_tokens / CLEAR_S
    prefill = prompt_rate * last.token_s / FULL_SHARE
    ended, gaps = new.ended - old.ended, new.gaps - old.gaps
    answer = (new.output_tokens - old.output_tokens) / max(1.0, ended)
    gap_s = (new.gaps_s - old.gaps_s) / gaps if gaps > 0 else 0.0
    request_rate = (new.arrived - old.arrived) / seconds + last.not_decoding / CLEAR_S
    rows = request_rate * answer * min(gap_s, tpot_s) / (FULL_SHARE * max(1.0, last.rows))
    return Demand(prefill, max(rows, len(last.of(DECODE)) * min(gap_s / tpot_s, MOST_TIMES)))


@dataclass(slots=True)
class Balancer:
    """Decide which nodes change roles, from recent observations."""

    settings: BalanceSettings = field(default_factory=BalanceSettings)
    demand: Demand | None = None  # over the last window; None until this window is whole
    # by node: ordered moves that are not complete
    _leaving: dict[str, RoleMove] = field(default_factory=dict)
    _left_at: float = -float("inf")
    _last_role: str = ""
    _window_times: float = 1.0
    _looks: deque[ClusterLook] = field(default_factory=deque)

    @property
    def window_s(self) -> float:
        return self.settings.window_s * self._window_times

    def see(self, look: ClusterLook) -> list[RoleMove]:
        """Return the moves that the caller must order."""
        self.demand = None
        if self._is_unsettled(look):
            self._looks.clear()
            return []
        self._looks.append(look)
        while look.at - self._looks[0].at > self.window_s:
            self._looks.popleft()
        if look.at - self._looks[0].at < WHOLE * self.window_s:
            return []
        self.demand = demand_between(self._looks[0], look, self.settings.tpot_s)
        moves = self._moves(self.demand, look)
        if moves:
            self.begin(moves, look.at)
        return moves

    def refused(self, move: RoleMove) -> None:
        self._leaving.pop(move.node, None)

    def is_short(self, look: ClusterLook) -> bool:
        num_nodes = len(look.of(PREFILL)) + len(look.of(DECODE))
        return self.demand is not None and self.demand.exceeds(num_nodes, self.settings.least)

    def _is_unsettled(self, look: ClusterLook) -> bool:
        was_leaving = bool(self._leaving)
        if look.at - self._left_at >= self.settings.away_s:
            self._leaving.clear()
        here = {node.name: node for node in look.nodes if node.state is NodeState.READY}
        for move in list(self._leaving.values()):
            if move.node in here and here[move.node].epoch != move.epoch:
                del self._leaving[move.node]
        return was_leaving or any(node.state is NodeState.DRAINING for node in look.nodes)

    def _moves(self, demand: Demand, look: ClusterLook) -> list[RoleMove]:
        prefills, decodes = look.of(PREFILL), look.of(DECODE)
        num_nodes, least = len(prefills) + len(decodes), self.settings.least
        if not prefills or not decodes or num_nodes < 2 * least:
            return []
        now, wanted = demand.pressure(len(prefills), len(decodes)), demand.best(num_nodes, least)
        if now < 1.0 or demand.pressure(wanted, num_nodes - wanted) > (1.0 - GAIN) * now:
            return []
        role, givers, num = PREFILL, decodes, wanted - len(prefills)
        if num < 0:
            role, givers, num = DECODE, prefills, -num
        idlest = sorted(givers, key=lambda node: (node.streams, node.name))
        num = min(num, max(1, len(givers) // 2))
        return [RoleMove(node.name, role, node.epoch, str(demand)) for node in idlest[:num]]

    def begin(self, moves: Sequence[RoleMove], now: float) -> None:
        """Record moves that the caller now orders. A new window begins when the nodes are back."""
        is_soon, role = now - self._left_at <= self.settings.calm_s, moves[0].role
        if not is_soon:
            self._window_times = 1.0
        elif role != self._last_role:
            self._window_times = min(LONGEST_WINDOW, 2 * self._window_times)
        self._leaving = {move.node: move for move in moves}
        self._last_role, self._left_at = role, now
        self._looks.clear()
