"""Search for a layout: first the split of the machines, then the settings of the best layout of each kind.

To save time, first simulate a few machines under their share of the load (a small simulation). Simulate only the
layouts found there, and their neighbours, with all machines (a full simulation). Both kinds are assumed to agree:
placement ignores prefixes, so chance decides which requests a node gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import Profile, StepShape
from deploy.tools.plan.simulate import Forecast, rank
from deploy.tools.traffic.load_plan import LoadPlan, LoadShape
from deploy.tools.traffic.workloads.trace import Trace
from shared.config.device_defaults import CPU
from shared.config.settings.router_settings import UNMEASURED_LOCAL_TOKENS

Forecaster = Callable[[ClusterLayout, LoadPlan], Forecast]
FEW = 4  # fewest machines of a small simulation
LEAST_REQUESTS = 200  # with fewer requests, chance would decide which layout looks best
CHUNKS = (128, 256, 512, 1024)
MIXED_CHUNKS = (32, 64, 128, 256)
LOCAL_TOKENS = (0, UNMEASURED_LOCAL_TOKENS, 128, 512)
DEFAULTS = {
    "chunk_size": CPU.chunk_size,
    "mixed_chunk_size": CPU.mixed_chunk_size,
    "local_tokens": UNMEASURED_LOCAL_TOKENS,  # fixed: deriving it takes costs, which simulated nodes do not report
}
SETTINGS: tuple[tuple[str, Sequence[int]], ...] = (
    ("mixed_chunk_size", MIXED_CHUNKS),
    ("chunk_size", CHUNKS),
    ("local_tokens", LOCAL_TOKENS),
)
ROUNDS = 2
NEAR = (0.5, 0.75, 1.0, 1.33, 2.0)  # tried numbers of prefill nodes, as multiples of the expected number
STEPS_UP = 16  # if a full simulation had too few machines, add a 16th of their number
SAME = 0.03  # goodputs that differ by a smaller share count as equal


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best forecast of each kind; None without such a layout. `tried`: all forecasts, best first."""

    aggregated: Forecast | None
    disaggregated: Forecast | None
    tried: list[Forecast]

    @property
    def best(self) -> Forecast:
        """The better kind's forecast. Disaggregation must gain more than SAME, since it is harder to run."""
        if self.disaggregated is None or self.aggregated is None:
            only = self.disaggregated or self.aggregated
            assert only is not None
            return only
        is_worth = self.disaggregated.goodput > self.aggregated.goodput * (1 + SAME)
        return self.disaggregated if is_worth else self.aggregated

    @property
    def other(self) -> Forecast | None:
        return self.aggregated if self.best is self.disaggregated else self.disaggregated


def find_plan(profile: Profile, plan: LoadPlan, machines: int, forecaster: Forecaster) -> SearchResult:
    few, small = in_small(plan, machines)
    found = search(profile, small, few, forecaster)
    if few == machines:
        return found
    grown = [grow(one.layout, few, machines) for one in (found.aggregated, found.disaggregated) if one is not None]
    tried = [forecaster(layout, plan) for one in grown for layout in around(one, few)]
    kinds = {kind: [one for one in tried if one.layout.is_disaggregated == kind] for kind in (False, True)}
    best = {kind: max(ones, key=lambda one: rank(one, plan)) for kind, ones in kinds.items() if ones}
    return SearchResult(best.get(False), best.get(True), sorted(tried, key=lambda one: rank(one, plan), reverse=True))


def in_small(plan: LoadPlan, machines: int) -> tuple[int, LoadPlan]:
    """Return a few machines and their share of the load, or all if a small simulation saves little."""
    few = max(FEW, math.ceil(machines * LEAST_REQUESTS / max(1.0, expected_requests(plan.load))))
    if plan.load.users:
        few = max(few, math.ceil(machines * FEW / plan.load.users))
    if machines <= 2 * few:
        return machines, plan
    return few, replace(plan, load=share_of(plan.load, few / machines))


def expected_requests(load: LoadShape) -> float:
    """Estimate the number of requests, without later turns. For a closed loop, return --requests or infinity."""
    most = math.inf if load.num_requests is None else float(load.num_requests)
    if isinstance(load.source, Trace):
        return min(most, sum(at < load.duration_s for at in load.source.offsets()))
    if load.arrivals is None:
        return most
    last = load.arrivals.value if load.arrivals.shape == "ramp" else load.arrivals.rate
    return min(most, (load.arrivals.rate + last) / 2 * load.duration_s)


def share_of(load: LoadShape, share: float) -> LoadShape:
    """Reduce the load to this share, over the same time. Keep this share of a trace's rows, evenly spread."""
    source, arrivals = load.source, load.arrivals
    if isinstance(source, Trace):
        rows = (row for i, row in enumerate(source.rows) if int((i + 1) * share) > int(i * share))
        source = replace(source, rows=tuple(rows))
    if arrivals is not None:
        value = arrivals.value * share if arrivals.shape == "ramp" else arrivals.value
        arrivals = replace(arrivals, rate=arrivals.rate * share, value=value)
    num_requests = None if load.num_requests is None else max(1, round(load.num_requests * share))
    users = max(1, round(load.users * share)) if load.users else 0
    return replace(load, source=source, arrivals=arrivals, users=users, num_requests=num_requests)


def grow(layout: ClusterLayout, few: int, machines: int) -> ClusterLayout:
    num_nodes = layout.num_nodes * machines // few
    prefill = round(layout.prefill / layout.num_nodes * num_nodes)
    return replace(layout, prefill=prefill, decode=num_nodes - prefill)


def around(layout: ClusterLayout, few: int) -> list[ClusterLayout]:
    if not layout.is_disaggregated:
        return [layout]
    by = max(1, layout.num_nodes // (2 * few * layout.per_host))
    counts = sorted({min(max(1, layout.prefill + delta), layout.num_nodes - 1) for delta in (-by, 0, by)})
    return [replace(layout, prefill=count, decode=layout.num_nodes - count) for count in counts]


def search(profile: Profile, plan: LoadPlan, machines: int, forecaster: Forecaster) -> SearchResult:
    tried: dict[ClusterLayout, Forecast] = {}

    def look(layout: ClusterLayout) -> Forecast:
        if layout not in tried:
            tried[layout] = forecaster(layout, plan)
        return tried[layout]

    best: dict[bool, Forecast] = {}
    for layout in splits(profile, plan, machines):
        kind = layout.is_disaggregated
        candidate = look(layout)
        if kind not in best or rank(candidate, plan) > rank(best[kind], plan):
            best[kind] = candidate
    for kind in best:
        best[kind] = tuned(best[kind], plan, look)
    ordered = sorted(tried.values(), key=lambda one: rank(one, plan), reverse=True)
    return SearchResult(best.get(False), best.get(True), ordered)


def splits(profile: Profile, plan: LoadPlan, machines: int) -> Iterator[ClusterLayout]:
    """Yield promising layouts that fill the machines: per node size, one aggregated and several disaggregated ones."""
    for cores in sorted(profile.nodes, reverse=True):
        per_host = max(1, profile.cores // cores)
        num_nodes = machines * per_host
        base = ClusterLayout(0, num_nodes, cores, per_host, **DEFAULTS)
        yield base
        expected = prefill_share(profile, plan, cores) * num_nodes
        counts = {min(max(1, round(factor * expected)), num_nodes - 1) for factor in NEAR} if num_nodes > 1 else set()
        for prefill in sorted(counts):
            yield replace(base, prefill=prefill, decode=num_nodes - prefill)


def prefill_share(profile: Profile, plan: LoadPlan, cores: int) -> float:
    """Estimate prefill's share of all work, if decode batches fill a quarter of a node's rows."""
    costs = profile.node(cores).alone
    prompt, answer = mean_lengths(plan)
    rows = max(1, profile.max_running // 4)
    prefill = prompt / 256 * costs.seconds(StepShape(256, 1, pairs=round(256 * prompt / 2)))
    decode = answer / rows * costs.seconds(StepShape(rows, rows, keys=round(rows * (prompt + answer / 2))))
    return prefill / (prefill + decode)


def mean_lengths(plan: LoadPlan, most: int = 64) -> tuple[float, float]:
    """Return (words per prompt, tokens per answer) of the first `most` sessions."""
    sessions = [session for session, _ in zip(plan.load.source.sessions(plan.load.seed), range(most), strict=False)]
    turns = [turn for session in sessions for turn in session.turns]
    opening = sum(len(text.split()) for session in sessions for _, text in session.opening)
    words = sum(len(turn.text.split()) for turn in turns) + opening
    return max(1.0, words / len(turns)), max(1.0, sum(turn.max_tokens for turn in turns) / len(turns))


def tuned(best: Forecast, plan: LoadPlan, look: Callable[[ClusterLayout], Forecast]) -> Forecast:
    """Change one setting at a time. Without hand-offs only chunk sizes matter."""
    for _ in range(ROUNDS):
        before = best
        for name, values in SETTINGS:
            if name == "local_tokens" and not best.layout.is_disaggregated:
                continue
            candidates = [look(replace(best.layout, **{name: value})) for value in values]
            best = max([best, *candidates], key=lambda one: rank(one, plan))
        if best is before:
            break
    return best


def find_fewest(
    profile: Profile, plan: LoadPlan, most: int, share: float, forecaster: Forecaster
) -> tuple[int | None, SearchResult]:
    """Return roughly the fewest machines with which a full search reaches `share`, and this search's result.

    If `most` machines are not enough, return None and the result for `most` machines.
    """
    machines = fewest_machines(profile, plan, most, share, forecaster)
    finding = find_plan(profile, plan, machines or most, forecaster)
    while machines is not None and finding.best.share < share:
        if machines == most:
            return None, finding
        machines = min(most, machines + max(1, machines // STEPS_UP))
        finding = find_plan(profile, plan, machines, forecaster)
    return machines, finding


def fewest_machines(profile: Profile, plan: LoadPlan, most: int, share: float, forecaster: Forecaster) -> int | None:
    """Return the fewest machines that are enough in small simulations with default settings.

    More machines are assumed never to be worse.
    """

    def is_enough(machines: int) -> bool:
        few, small = in_small(plan, machines)
        return any(forecaster(layout, small).share >= share for layout in splits(profile, small, few))

    low, high = 0, 1
    while not is_enough(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
