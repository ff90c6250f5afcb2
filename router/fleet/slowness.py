"""Find nodes whose steps take longer than their peers', and say how much less work they get. Sans-IO.

    whole --FACTOR for SURE_S--> eased --FAR for FAR_S--> trickle
      ^------- below BACK --------'  ^--- below FACTOR ------'

In a trickle, a node gets one request at a time, to show that it has recovered.

A node is compared with its peers, the nodes of its kind. For more work than a peer's, a node may take proportionally
more time. For less work, it may take the peer's whole time, because most of that time may be fixed. docs/placement.md
explains why an eased node then looks faster. BACK is below the square root of FACTOR, so that less work alone can't
make a node whole. In a trickle even a very slow node may look fast. Then the node becomes eased, with slowness FAR, and
gets enough work to be judged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from router.fleet.prompt_cost import COUNTERS, FRESH_S, MOST_STEP_S, is_plausible
from shared.core.states import PageState, RowState
from shared.wire.messages import NodeLoad

STEP_SECONDS = "step_seconds"  # the metric in nodes' reports: the time from a step's launch to its result
FEWEST_STEPS = 4  # a decode node's report counts only with at least this number of steps without prompts
NUM_NODES = 3  # with two nodes, it is unknown which one is slow
MOST_PEERS = 32  # peers with which one report is compared; comparisons take time
FACTOR, SURE_S = 1.5, 3.0
FAR, FAR_S = 4.0, 10.0
BACK = 1.15  # the square root of FACTOR, minus the largest swing of the smoothed slowness
SMOOTH_S = 3.0  # time constant of a node's slowness
MOST_SMOOTHED_S = 1.0  # one report counts for at most this time
MOST = 16.0  # limit on one report's slowness
QUIET_S = 5.0  # after this idle time, an eased node may get the next request


class Share(StrEnum):
    """How much of the usual work a node gets, as `baton admin status` shows it."""

    WHOLE = "whole"
    EASED = "eased"
    TRICKLE = "trickle"


@dataclass(frozen=True, slots=True)
class Steps:
    """The mean step of a report: with prompts on a prefill node, without them on a decode node. A median would hide the
    pauses of a throttled process. `pages`: the pages in use, because attention reads them."""

    seconds: float
    tokens: float
    pages: int

    def times(self, peer: Steps) -> float:
        """Return this step's time divided by the longest time that this work may take, judged by the peer."""
        more = max(1.0, self.tokens / peer.tokens, self.pages / max(1, peer.pages))
        return self.seconds / (more * peer.seconds)


class Slowness:
    """The slowness of one incarnation of a node. `times`: the smoothed slowness, 1 for a node as fast as its peers."""

    __slots__ = ("_is_news", "_judged_at", "_measured_at", "_since", "_steps", "_totals", "is_quiet", "share", "times")

    def __init__(self) -> None:
        self.times = 1.0
        self.share = Share.WHOLE
        self.is_quiet = False
        self._is_news = False
        self._totals: tuple[float, ...] | None = None
        self._steps: Steps | None = None
        self._measured_at = self._judged_at = -float("inf")
        self._since: float | None = None  # when the slowness rose above the next share's factor

    @property
    def weight(self) -> float:
        return 1.0 if self.share is Share.WHOLE else self.times

    def learn(self, role: str, load: NodeLoad, now: float) -> None:
        before = self._totals
        self._totals = totals = tuple(load.counters.get(name, 0.0) for name in COUNTERS)
        if before is None:
            return
        prompts = tuple(new - old for new, old in zip(totals, before, strict=True))
        steps = prompt_steps(load, *prompts) if role == "prefill" else decode_steps(load, prompts[0])
        if steps is not None:
            self._steps, self._measured_at = steps, now

    def steps(self, now: float) -> Steps | None:
        """None if not measured lately."""
        return self._steps if now - self._measured_at <= FRESH_S else None

    def judge(self, peers: Iterable[Slowness], now: float) -> None:
        own = self.steps(now)
        measured = (steps for peer in peers if (steps := peer.steps(now)) is not None)
        others = list(islice(measured, MOST_PEERS)) if own is not None else []  # an idle node is not compared
        self.is_quiet = now - self._measured_at > QUIET_S
        if own is None or len(others) + 1 < NUM_NODES:
            self.times, self._since = 1.0, None
            self._settle(Share.WHOLE)
        elif self._measured_at > self._judged_at:
            times = statistics.median_low([own.times(other) for other in others])
            kept = math.exp(-min(now - self._judged_at, MOST_SMOOTHED_S) / SMOOTH_S)
            self.times = self.times**kept * min(max(times, 1.0), MOST) ** (1.0 - kept)
            self._judged_at = now
            self._settle(self._next_share(now))

    def _next_share(self, now: float) -> Share:
        if self.share is Share.TRICKLE:
            if self.times > FACTOR:
                return Share.TRICKLE
            self.times = FAR
            return Share.EASED
        if self.share is Share.EASED and self.times < BACK:
            return Share.WHOLE
        factor, for_s, next_share = (FACTOR, SURE_S, Share.EASED)
        if self.share is Share.EASED:
            factor, for_s, next_share = (FAR, FAR_S, Share.TRICKLE)
        if self.times <= factor:
            self._since = None
            return self.share
        self._since = now if self._since is None else self._since
        return next_share if now - self._since >= for_s else self.share

    def _settle(self, share: Share) -> None:
        if share is not self.share:
            self._is_news = self._is_news != (Share.WHOLE in (share, self.share))
            self.share, self._since = share, None

    def take_news(self) -> Share | None:
        """Return the share if it has changed from or to WHOLE since the last call."""
        is_news, self._is_news = self._is_news, False
        return self.share if is_news else None


def prompt_steps(load: NodeLoad, steps: float, tokens: float, seconds: float) -> Steps | None:
    if not is_plausible(steps, tokens, seconds):
        return None
    return Steps(seconds / steps, tokens / steps, load.pages.get(PageState.ACTIVE, 0))


def decode_steps(load: NodeLoad, num_prompt_steps: float) -> Steps | None:
    """Assume that steps with prompts, and the steps right after them, are the longest."""
    samples = sorted(load.observations.get(STEP_SECONDS, ()))
    samples = samples[: max(0, len(samples) - round(2 * min(max(0.0, num_prompt_steps), len(samples))))]
    running = load.rows.get(RowState.RUNNING, 0)
    if len(samples) < FEWEST_STEPS or not running or not 0.0 < samples[0] <= samples[-1] <= MOST_STEP_S:
        return None
    return Steps(statistics.fmean(samples), max(1, running * load.spec_width), load.pages.get(PageState.ACTIVE, 0))
