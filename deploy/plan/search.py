"""Which layout: the ways to divide the machines are tried first, then the settings of the best of each kind.

A candidate costs a simulated run, so the search is narrow: prefill's share of all work says around which ratio to look,
and of the settings one is changed at a time, kept when it is better, in two rounds. Many machines are searched for in
small: a few of them under their share of the load, and only what is found there is simulated in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from deploy.load.plan import LoadPlan
from deploy.plan.layout import Layout
from deploy.plan.profile import Profile, StepShape
from deploy.plan.simulate import Forecast, rank

Forecaster = Callable[[Layout, LoadPlan], Forecast]
FEW = 4  # machines that stand for many
CHUNKS = (128, 256, 512, 1024)
MIXED_CHUNKS = (32, 64, 128, 256)
LOCAL_TOKENS = (0, 32, 128, 512)
DEFAULTS = {"chunk_size": 256, "mixed_chunk_size": 64, "local_tokens": 32}
SETTINGS: tuple[tuple[str, Sequence[int]], ...] = (
    ("mixed_chunk_size", MIXED_CHUNKS),
    ("chunk_size", CHUNKS),
    ("local_tokens", LOCAL_TOKENS),
)
ROUNDS = 2
NEAR = (0.5, 0.75, 1.0, 1.33, 2.0)  # times the expected number of prefill nodes
SAME = 0.03  # goodput of two layouts that differ by less is the same: chance does as much


@dataclass(frozen=True, slots=True)
class Finding:
    """The best of each kind; None where the machines allow none. `tried`: all forecasts, the best first."""

    aggregated: Forecast | None
    disaggregated: Forecast | None
    tried: list[Forecast]

    @property
    def best(self) -> Forecast:
        """Disaggregated only when that is worth something: it is one more thing to run."""
        if self.disaggregated is None or self.aggregated is None:
            only = self.disaggregated or self.aggregated
            assert only is not None
            return only
        is_worth = self.disaggregated.goodput > self.aggregated.goodput * (1 + SAME)
        return self.disaggregated if is_worth else self.aggregated

    @property
    def other(self) -> Forecast | None:
        return self.aggregated if self.best is self.disaggregated else self.disaggregated


def find(profile: Profile, plan: LoadPlan, machines: int, forecaster: Forecaster) -> Finding:
    small = in_small(plan, machines)
    if small is None:
        return search(profile, plan, machines, forecaster)
    found = search(profile, small, FEW, forecaster)
    grown = [grow(one.layout, machines) for one in (found.aggregated, found.disaggregated) if one is not None]
    tried = [forecaster(layout, plan) for one in grown for layout in around(one)]
    kinds = {kind: [one for one in tried if one.layout.is_disaggregated == kind] for kind in (False, True)}
    best = {kind: max(ones, key=lambda one: rank(one, plan)) for kind, ones in kinds.items() if ones}
    return Finding(best.get(False), best.get(True), sorted(tried, key=lambda one: rank(one, plan), reverse=True))


def in_small(plan: LoadPlan, machines: int) -> LoadPlan | None:
    """The share of the load that a few of the machines get; None where there are few, or the load has times of its
    own."""
    arrivals = plan.load.arrivals
    if machines <= 2 * FEW or arrivals is None:
        return None
    share = FEW / machines
    arrivals = replace(arrivals, rate=arrivals.rate * share)
    if arrivals.shape == "ramp":
        arrivals = replace(arrivals, value=arrivals.value * share)
    return replace(plan, load=replace(plan.load, arrivals=arrivals))


def grow(layout: Layout, machines: int) -> Layout:
    num_nodes = layout.num_nodes * machines // FEW
    prefill = round(layout.prefill / layout.num_nodes * num_nodes)
    return replace(layout, prefill=prefill, decode=num_nodes - prefill)


def around(layout: Layout) -> list[Layout]:
    """With some more and some fewer prefill nodes: in small they could not be told apart."""
    if not layout.is_disaggregated:
        return [layout]
    by = max(1, layout.num_nodes // (2 * FEW * layout.per_host))
    counts = sorted({min(max(1, layout.prefill + delta), layout.num_nodes - 1) for delta in (-by, 0, by)})
    return [replace(layout, prefill=count, decode=layout.num_nodes - count) for count in counts]


def search(profile: Profile, plan: LoadPlan, machines: int, forecaster: Forecaster) -> Finding:
    tried: dict[Layout, Forecast] = {}

    def look(layout: Layout) -> Forecast:
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
    return Finding(best.get(False), best.get(True), ordered)


def splits(profile: Profile, plan: LoadPlan, machines: int) -> Iterator[Layout]:
    """Nodes as large as was measured, as many as fit on the machines, and for each the promising ratios."""
    for cores in sorted(profile.nodes, reverse=True):
        per_host = max(1, profile.cores // cores)
        num_nodes = machines * per_host
        base = Layout(0, num_nodes, cores, per_host, **DEFAULTS)
        yield base
        expected = prefill_share(profile, plan, cores) * num_nodes
        counts = {min(max(1, round(factor * expected)), num_nodes - 1) for factor in NEAR} if num_nodes > 1 else set()
        for prefill in sorted(counts):
            yield replace(base, prefill=prefill, decode=num_nodes - prefill)


def prefill_share(profile: Profile, plan: LoadPlan, cores: int) -> float:
    """Of all work, when rows decode in batches of a quarter of what a node takes: a first guess, no more."""
    costs = profile.node(cores).alone
    prompt, answer = mean_lengths(plan)
    rows = max(1, profile.max_running // 4)
    prefill = prompt / 256 * costs.seconds(StepShape(256, 1, pairs=round(256 * prompt / 2)))
    decode = answer / rows * costs.seconds(StepShape(rows, rows, keys=round(rows * (prompt + answer / 2))))
    return prefill / (prefill + decode)


def mean_lengths(plan: LoadPlan, most: int = 64) -> tuple[float, float]:
    """Words of a prompt and tokens of an answer, over the first sessions."""
    sessions = [session for session, _ in zip(plan.load.source.sessions(plan.load.seed), range(most), strict=False)]
    turns = [turn for session in sessions for turn in session.turns]
    opening = sum(len(text.split()) for session in sessions for _, text in session.opening)
    words = sum(len(turn.text.split()) for turn in turns) + opening
    return max(1.0, words / len(turns)), max(1.0, sum(turn.max_tokens for turn in turns) / len(turns))


def tuned(best: Forecast, plan: LoadPlan, look: Callable[[Layout], Forecast]) -> Forecast:
    """One setting at a time. Where nothing is handed over, only the mixed chunk means anything beside the chunk."""
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


def fewest_machines(profile: Profile, plan: LoadPlan, most: int, share: float, forecaster: Forecaster) -> int | None:
    """The smallest number that some split, with the default settings, brings `share` of the requests within the SLO;
    None: not even `most` do. More machines are taken to be no worse."""

    def is_enough(machines: int) -> bool:
        small = in_small(plan, machines) or plan
        few = machines if small is plan else FEW
        return any(forecaster(layout, small).share >= share for layout in splits(profile, small, few))

    high = 1
    while not is_enough(high):
        if high >= most:
            return None
        high = min(2 * high, most)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
