"""Summarize sessions of several turns: the time to the first token by turn, and what caches saved. Pure.

A later turn has a longer prompt, most of which the server has seen. Where it computes the prompt again, the time to the
first token grows from turn to turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deploy.tools.traffic.figures.figures import NOTHING, Estimate, Resampling, one_each
from deploy.tools.traffic.figures.record import RequestRecord

TTFT_LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
AT_ONCE = "several at once"


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """The requests of some turns. `computed`: the share of their prompt tokens that no cache had; NaN if unknown."""

    turns: str
    num_requests: int
    num_failed: int
    ttft: dict[str, Estimate]
    computed: Estimate


@dataclass(frozen=True, slots=True)
class TalkFigures:
    """`by_turn`: empty without later turns. Its last row has the requests that a turn sent at once, which the rows of
    their turns have too. `num_calls`: answers that ended in the call of a tool."""

    num_sessions: int = 0
    num_failed: int = 0  # sessions with a failed request
    num_turns: int = 0
    num_calls: int = 0
    computed: Estimate = NOTHING
    by_turn: list[TurnFigures] = field(default_factory=list)


NO_TALKS = TalkFigures()


def talk_figures(judged: Sequence[RequestRecord], boot: Resampling) -> TalkFigures:
    """`boot` draws from `judged`."""
    per_turn = Counter((record.session, record.turn) for record in judged)
    return TalkFigures(
        num_sessions=len({record.session for record in judged}),
        num_failed=len({record.session for record in judged if record.error}),
        num_turns=len(per_turn),
        num_calls=sum(record.is_call for record in judged),
        computed=computed_share(judged, boot, lambda record: True),
        by_turn=rows_by_turn(judged, boot, per_turn) if any(record.turn for record in judged) else [],
    )


def rows_by_turn(
    judged: Sequence[RequestRecord], boot: Resampling, per_turn: Counter[tuple[int, int]]
) -> list[TurnFigures]:
    kinds: dict[str, Callable[[RequestRecord], bool]] = {
        "1": lambda record: record.turn == 0,
        "2": lambda record: record.turn == 1,
        "3-5": lambda record: 2 <= record.turn < 5,
        "6+": lambda record: record.turn >= 5,
        AT_ONCE: lambda record: per_turn[record.session, record.turn] > 1,
    }
    rows = (row_of(turns, judged, boot, is_in) for turns, is_in in kinds.items())
    return [row for row in rows if row.num_requests]


def row_of(
    turns: str, judged: Sequence[RequestRecord], boot: Resampling, is_in: Callable[[RequestRecord], bool]
) -> TurnFigures:
    ttfts = one_each([record.ttft if is_in(record) else math.nan for record in judged])
    estimates = boot.quantiles(ttfts, list(TTFT_LEVELS.values()))
    return TurnFigures(
        turns,
        num_requests=sum(map(is_in, judged)),
        num_failed=sum(bool(record.error) for record in judged if is_in(record)),
        ttft=dict(zip(TTFT_LEVELS, estimates, strict=True)),
        computed=computed_share(judged, boot, is_in),
    )


def computed_share(
    judged: Sequence[RequestRecord], boot: Resampling, is_in: Callable[[RequestRecord], bool]
) -> Estimate:
    """Count only requests whose usage tells what a cache had."""
    pairs = [
        (one.prompt_tokens - one.cached_tokens, one.prompt_tokens)
        if one.cached_tokens is not None and is_in(one)
        else (0, 0)
        for one in judged
    ]
    return boot.share([computed for computed, _ in pairs], [prompt for _, prompt in pairs])
