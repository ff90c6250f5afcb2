"""What one seed did: plain values that travel between processes. Loads nothing heavy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MIN_REQUESTS, MIN_HITS, MIN_KINDS, MOST_NODES = 20, 3, 2, 12
LONG_WAIT_S = 2.0  # of an offer, in a load that is about waiting
# loads that are about one thing
NEEDED_HITS = {"overload": 0, "twins": 0, "one way": 1, "drains": 1, "lost generates": 3}
Step = tuple[str, str, str]  # machine, from, to


@dataclass
class SeedReport:
    seed: int
    mood: str = "normal"
    num_nodes: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_messages: int = 0
    cpu_s: float = 0.0
    engine_s: float = 0.0  # of it, inside the nodes' engines
    sim_s: float = 0.0
    hits: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)  # of resumes and failures
    rare: Counter[str] = field(default_factory=Counter)
    num_routers: int = 1
    longest_wait_s: float = 0.0  # of an offer, for its grant
    longest_pause: int = 0  # steps of its node that a stream paused in mid-answer, without a failed one
    transitions: Counter[Step] = field(default_factory=Counter)
    failure: str = ""
    timeline: list[str] = field(default_factory=list)
    digest: str = ""

    @property
    def counts(self) -> bool:
        """Whether this seed was hard enough to prove something."""
        if self.mood in NEEDED_HITS:
            has_waited = self.mood != "overload" or self.longest_wait_s > LONG_WAIT_S
            return has_waited and sum(self.hits.values()) >= NEEDED_HITS[self.mood]
        enough = sum(self.hits.values()) >= MIN_HITS and len(self.hits) >= MIN_KINDS
        return enough and 2 <= self.num_nodes <= MOST_NODES and self.num_requests >= MIN_REQUESTS
