"""Adds up what many seeds did, and says what they did not do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.sim.machines import EXPECTED
from tests.support.sim.report import SeedReport, Step

ENOUGH = 20  # times in a long run
LONG_RUN = 2000  # seeds
EVENTS = (
    "unpin then grant",
    "unpin then grant, computed again",
    "revoke while pulling",
    "retracted after its grant",
    "tombstone before offer",
    "offer before its router's Welcome",
    "wait then elsewhere",
    "wait longer than a lease, then grant",
    "grant after give-up",
    "late Installed",
    "Welcome of an old connection",
    "drain told again",
    "resumed twice",
    "connection taken over",
    "dial never answered",
    "full queue",
    "half a message dropped",
    "offered under a grammar",
    "retracted under a grammar",
    "resumed under a grammar",
    "pull.pulled",
    "pull.refused",
    "pull.late",
    "pull.lost",
    "pull.ended",
    "pull.no_memory",
    "pull.not_asked",
    "pull.cached_here",
    "pull.under_way",
    "pull.gave_way",
    "loans_gave_way",
)
LARGE = 8  # nodes
BOTH = (300, 2000)  # engine steps and messages that one core must manage within one second


@dataclass
class Summary:
    counted: int = 0
    uncounted: int = 0
    requests: int = 0
    tokens: int = 0
    steps: int = 0
    messages: int = 0
    cpu_s: float = 0.0
    engine_s: float = 0.0
    moods: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    transitions: Counter[Step] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    rare: Counter[str] = field(default_factory=Counter)
    large: int = 0  # seeds with many nodes
    shared: int = 0  # seeds with several routers
    longest_pause: int = 0
    failures: list[SeedReport] = field(default_factory=list)

    def add(self, report: SeedReport) -> None:
        """A failure always matters; the sums are of counted seeds only."""
        if report.failure:
            self.failures.append(report)
        if not report.counts:
            self.uncounted += 1
            return
        self.counted += 1
        self.moods[report.mood] += 1
        self.requests += report.num_requests
        self.tokens += report.num_tokens
        self.steps += report.num_steps
        self.messages += report.num_messages
        self.cpu_s += report.cpu_s
        self.engine_s += report.engine_s
        self.hits += report.hits
        self.outcomes += report.outcomes
        self.causes += report.causes
        self.longest_pause = max(self.longest_pause, report.longest_pause)
        self.rare += report.rare
        self.large += report.num_nodes >= LARGE
        self.shared += report.num_routers > 1
        self.transitions += report.transitions

    @property
    def missing(self) -> list[Step]:
        return sorted(EXPECTED - set(self.transitions))

    @property
    def unseen(self) -> list[str]:
        """Rare events that a long run must have seen more often; a short one owes nothing."""
        return seldom(self.rare) if self.counted >= LONG_RUN else []

    @property
    def speeds(self) -> tuple[float, float]:
        """Engine steps per second of the engines' processor time, messages per second of all the rest."""
        return self.steps / max(self.engine_s, 1e-9), self.messages / max(self.cpu_s - self.engine_s, 1e-9)

    @property
    def seconds_for_both(self) -> float:
        """Of one core, for as many steps and messages as it must manage within one."""
        return sum(count / max(speed, 1e-9) for count, speed in zip(BOTH, self.speeds, strict=True))

    def lines(self) -> list[str]:
        taken = sum(step in EXPECTED for step in self.transitions)
        return [
            f"seeds        {self.counted} counted ({listed(self.moods)}), {self.uncounted} too easy to count",
            f"work         {self.requests} requests, {self.tokens} tokens, {self.steps} steps, "
            f"{self.messages} messages",
            f"speed        {self.speeds[0]:.0f} engine steps a second of engine time, {self.speeds[1]:.0f} messages a "
            "second of all other time, on one core",
            f"together     {self.steps / max(self.cpu_s, 1e-9):.0f} steps and "
            f"{self.messages / max(self.cpu_s, 1e-9):.0f} messages in the same second of one core; "
            f"{BOTH[0]} steps and {BOTH[1]} messages take {self.seconds_for_both:.2f} s of it",
            f"faults       {listed(self.hits)} (each hit an open request)",
            f"shapes       {self.large} with {LARGE} nodes or more, {self.shared} with two or three routers",
            f"pauses       at most {self.longest_pause} steps in mid-answer",
            f"ends         {listed(self.outcomes)}",
            f"causes       {listed(self.causes)}",
            f"rare         {listed(self.rare)}",
            *(f"  seldom     {name} ({self.rare[name]})" for name in seldom(self.rare)),
            f"transitions  {taken} of {len(EXPECTED)} taken",
            *(f"  never      {machine}: {old} -> {new}" for machine, old, new in self.missing),
            *(f"  unlisted   {m}: {old} -> {new} ({self.transitions[m, old, new]})" for m, old, new in self.surprises),
        ]

    @property
    def surprises(self) -> list[Step]:
        """Taken, but in no list of this simulation's: states named too coarsely, or a way nobody thought of."""
        return sorted(set(self.transitions) - EXPECTED)


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "none"


def seldom(counts: Mapping[str, int]) -> list[str]:
    """Events that happened less often than a long run must see them."""
    return [name for name in EVENTS if counts.get(name, 0) < ENOUGH]
