"""The mixes of long prompts and steady decoding that disaggregation is judged on. Values, and the files they become."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from deploy.tools.traffic.workloads.workload import text_of

SLO = "ttft<1500ms,tpot<25ms"


@dataclass(frozen=True, slots=True)
class Kind:
    """Of `weight` in all requests: words of the prompt, tokens of the answer."""

    weight: float
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Mix:
    """`is_held_out`: nothing of the planner was looked at with it."""

    name: str
    what: str
    kinds: tuple[Kind, ...]
    rate: float
    arrivals: str = "poisson"
    is_held_out: bool = False
    slo: str = SLO

    def write(self, path: Path, num_lines: int) -> None:
        rng = random.Random(self.name)
        weights = [kind.weight for kind in self.kinds]
        with path.open("w", encoding="utf-8") as out:
            for kind in rng.choices(self.kinds, weights, k=num_lines):
                prompt = text_of(rng, max(8, round(rng.gauss(kind.prompt, kind.prompt / 8))))
                out.write(json.dumps({"prompt": prompt, "max_tokens": kind.answer}) + "\n")

    def flags(self, folder: Path, seconds: float) -> list[str]:
        """For `baton load` and `baton plan`: the same requests at the same times."""
        path = folder / f"{self.name}.jsonl"
        if not path.exists():
            self.write(path, 20 + round(2 * self.rate * seconds))
        load = ["--prompts", str(path), "--rate", f"{self.rate:g}", "--arrivals", self.arrivals]
        return [*load, "--duration", f"{seconds:g}", "--slo", self.slo]


CHAT, LONG = (60, 100), (1200, 16)
MIXES = (
    Mix("chat", "short prompts, answers of 100", (Kind(1, *CHAT),), 2.5),
    Mix("rush", "the same, three times as many", (Kind(1, *CHAT),), 8.0),
    Mix("answers", "short prompts, answers of 300", (Kind(1, 60, 300),), 2.2),
    Mix("some-long", "chat, and a tenth are prompts of 1,200", (Kind(9, *CHAT), Kind(1, *LONG)), 2.5),
    Mix("many-long", "chat, and three tenths are prompts of 1,200", (Kind(7, *CHAT), Kind(3, *LONG)), 1.8),
    Mix("long", "only prompts of 1,200, answers of 16", (Kind(1, *LONG),), 0.7),
    Mix("documents", "prompts of 500, answers of 150", (Kind(1, 500, 150),), 1.2),
    Mix("bursts", "bursts of chat and prompts of 800", (Kind(8, 120, 60), Kind(2, 800, 40)), 1.8, "gamma:2.5"),
    Mix("summaries", "prompts of 900, answers of 60", (Kind(1, 900, 60),), 0.8),
    Mix(
        "agents",
        "prompts of 150 and of 1,000, answers of 50",
        (Kind(6, 150, 50), Kind(4, 1000, 50)),
        1.1,
        "poisson",
        True,
    ),
    Mix("notes", "prompts of 200, answers of 120", (Kind(1, 200, 120),), 2.2, is_held_out=True),
    Mix("reviews", "prompts of 700 and of 100", (Kind(2, 700, 100), Kind(1, 100, 60)), 1.0, is_held_out=True),
    Mix("tickets", "bursts of prompts of 250, answers of 90", (Kind(1, 250, 90),), 1.6, "gamma:2", True),
)
