"""What one seed did: plain values that travel between processes. Loads nothing heavy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MIN_REQUESTS, MIN_HITS, MIN_KINDS = 20, 3, 2
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
    transitions: Counter[Step] = field(default_factory=Counter)
    failure: str = ""
    timeline: list[str] = field(default_factory=list)
    digest: str = ""

    @property
    def counts(self) -> bool:
        """Whether this seed was hard enough to prove something."""
        enough = sum(self.hits.values()) >= MIN_HITS and len(self.hits) >= MIN_KINDS
        return enough and 2 <= self.num_nodes <= 6 and self.num_requests >= MIN_REQUESTS
