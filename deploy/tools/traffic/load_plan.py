"""Turn the flags into a checked load. Asks no server."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.tools.traffic.drills import Planned, parse_drill
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.figures.slo import Slo, parse_slo
from deploy.tools.traffic.figures.summary import Reader, Window
from deploy.tools.traffic.options import AGENTS, AGENTS_DURATION_S, DURATION_S, PLAIN
from deploy.tools.traffic.runner import Storm
from deploy.tools.traffic.workloads.arrivals import Arrivals, parse_arrivals
from deploy.tools.traffic.workloads.driver import Driver, HangUps, Limits
from deploy.tools.traffic.workloads.lengths import ONE, parse_lengths, parse_pauses
from deploy.tools.traffic.workloads.trace import Trace, read_trace
from deploy.tools.traffic.workloads.workload import FromFile, Session, Synthetic, read_prompts, with_probes
from shared.core.errors import ConfigError

LAST_ARRIVAL_S = 1e-3  # added so that the window contains a trace's last arrival


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Sessions and their start times.

    A closed loop has `users`, an open loop has `arrivals`, and a trace has its own times.
    """

    source: Synthetic | FromFile | Trace
    arrivals: Arrivals | None
    users: int
    duration_s: float
    num_requests: int | None
    seed: int
    hang_up: float = 0.0

    def driver(self, probes: Sequence[Session], every: int) -> Driver:
        hang_ups = HangUps(self.hang_up, self.seed) if self.hang_up else None
        sessions = with_probes(self.source.sessions(self.seed), probes, every)
        return Driver(sessions, self._offsets(), self.users, Limits(self.duration_s, self.num_requests), hang_ups)

    def _offsets(self) -> Iterator[float] | None:
        if isinstance(self.source, Trace):
            return self.source.offsets()
        return self.arrivals.offsets(self.seed) if self.arrivals is not None else None


@dataclass(frozen=True, slots=True)
class Truth:
    golden: int
    every: int
    file: Path | None
    near_tie: float
    stall_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class LoadPlan:
    load: LoadShape
    slo: Slo
    reader: Reader
    truth: Truth
    warmup_s: float
    drain_s: float
    timeout_s: float
    resume: bool = False
    storms: tuple[Storm, ...] = ()
    drill: Planned | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def window(self, records: Sequence[RequestRecord], interrupted_at: float = math.inf) -> Window:
        """Return the judged window: for an open loop, the time in which requests began.

        In a closed loop, or if --requests cut the load short, the window lasts until the last answer.
        """
        was_cut = self.load.num_requests is not None and len(records) >= self.load.num_requests
        if self.load.users or was_cut:
            ends = [record.end for record in records if not math.isnan(record.end)]
            return Window(self.warmup_s, max(ends, default=self.load.duration_s))
        return Window(self.warmup_s, min(self.load.duration_s, interrupted_at))


def plan_of(args: argparse.Namespace) -> LoadPlan:
    """Raise ConfigError for invalid flags."""
    args = with_defaults(args)
    for flag in ("duration", "timeout", "stall", "reading_tps"):
        require(args, flag, lambda value: value > 0, "above 0")
    for flag in ("warmup", "drain", "rest", "near_tie", "temperature"):
        require(args, flag, lambda value: value >= 0, "0 or more")
    for flag in ("hang_up", "slo_share"):
        require(args, flag, lambda value: 0 <= value <= 1, "between 0 and 1")
    for flag in ("golden", "prefix_tokens", "longest_prompt"):
        require(args, flag, lambda value: value >= 0, "0 or more")
    for flag in ("golden_every", "prefix_groups", "requests", "concurrency", "agents"):
        require(args, flag, lambda value: value >= 1, "1 or more")
    load = load_of(args)
    if args.warmup >= load.duration_s:
        raise ConfigError("--warmup must be shorter than --duration")
    if args.sweep and (args.drill or args.storm or load.users):
        raise ConfigError(
            "--sweep varies only the rate of an open loop: no --concurrency, --agents, --drill or --storm"
        )
    return LoadPlan(
        load=load,
        slo=parse_slo(args.slo),
        reader=Reader(args.reading_tps),
        truth=truth_of(args),
        warmup_s=args.warmup,
        drain_s=args.drain,
        timeout_s=args.timeout,
        resume=args.resume,
        storms=tuple(parse_storm(text) for text in args.storm),
        drill=parse_drill(args.drill) if args.drill else None,
        extra=parse_extra(args.extra_body),
    )


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    usual = asdict(PLAIN if args.agents is None else AGENTS)
    given = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**vars(args) | usual | given)


def require(args: argparse.Namespace, name: str, holds: Callable[[float], bool], what: str) -> None:
    value = getattr(args, name)
    if value is not None and not (math.isfinite(value) and holds(value)):
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be {what}")


def load_of(args: argparse.Namespace) -> LoadShape:
    if sum(one is not None for one in (args.prompts, args.trace)) > 1:
        raise ConfigError("give either --prompts or --trace, not both")
    if args.agents and (args.concurrency or args.prompts or args.trace):
        raise ConfigError("--agents makes its own sessions: no --concurrency, --prompts or --trace")
    source = source_of(args)
    usual_s = AGENTS_DURATION_S if args.agents else DURATION_S
    duration_s = usual_s if args.duration is None else args.duration
    if isinstance(source, Trace):
        whole_s = source.rows[-1].at_s / source.speed + LAST_ARRIVAL_S
        duration_s = whole_s if args.duration is None else min(args.duration, whole_s)
    users = args.agents or args.concurrency or 0
    arrivals = None if users else parse_arrivals(args.arrivals, args.rate, duration_s)
    return LoadShape(source, arrivals, users, duration_s, args.requests, args.seed, args.hang_up)


def source_of(args: argparse.Namespace) -> Synthetic | FromFile | Trace:
    if args.trace is not None:
        if args.concurrency or args.sweep:
            raise ConfigError("--trace has its own times: no --concurrency and no --sweep with it")
        return read_trace(args.trace, args.trace_speed, args.longest_prompt)
    output = parse_lengths("--output-tokens", args.output_tokens)
    think = parse_pauses("--think", args.think)
    if args.prompts is not None:
        return FromFile(read_prompts(args.prompts), output, think)
    return Synthetic(
        parse_lengths("--prompt-tokens", args.prompt_tokens),
        output,
        parse_lengths("--turns", args.turns),
        think,
        args.prefix_tokens,
        args.prefix_groups,
        # Parsed, the 1 would draw random numbers too, and a seed's plain load would differ from earlier versions'.
        ONE if args.fan_out == ONE.text else parse_lengths("--fan-out", args.fan_out),
        has_tools=args.agents is not None,
    )


def truth_of(args: argparse.Namespace) -> Truth:
    golden = 0 if args.temperature > 0 else args.golden
    return Truth(golden, args.golden_every, args.golden_file, args.near_tie, args.stall, args.rest)


def golden_prompts(plan: LoadPlan) -> list[Session]:
    """Draw first turns as the load does, but from another seed, so that no cache has these prompts."""
    drawn = itertools.islice(plan.load.source.sessions(plan.load.seed + 1_000_003), plan.truth.golden)
    return [Session(one.turns[:1], one.opening, probe) for probe, one in enumerate(drawn)]


def parse_storm(text: str) -> Storm:
    at, colon, share = text.partition(":")
    try:
        storm = Storm(float(at), float(share))
    except ValueError:
        storm = Storm(-1.0, -1.0)
    if not (colon and storm.at_s >= 0 and 0 < storm.share <= 1 and math.isfinite(storm.at_s)):
        raise ConfigError(
            f"--storm is {text!r}; it must look like 20:0.5: the time in seconds, and the share of open requests"
        )
    return storm


def parse_extra(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"--extra-body is {text!r}; it must be a JSON object")
    return found
