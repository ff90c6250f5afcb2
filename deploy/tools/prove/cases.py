"""The compared requests, in plain ASCII, which every tokenizer takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from shared.core.sampling_params import NEUTRAL

FOX = "The quick brown fox jumps over the lazy dog. "
STORY = (
    "Long before the harbour had lights, the keeper of the northern tower wrote one line a day into a book that nobody "
    "was meant to read. The first line said that the sea was calm. The second said the same. "
)
CODE = "def add(a, b): return a + b   # the sum of two numbers.   def mul(a, b): return a * b   # the product of "
NUMBERS = "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, "
# With every value, so that no server's defaults matter.
SAMPLED = asdict(NEUTRAL) | {"temperature": 0.8, "seed": 7}
GREEDY = asdict(NEUTRAL) | {"temperature": 0.0}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prompt: str
    fields: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("short, greedy", FOX, GREEDY),
    Case("short, sampled", FOX, SAMPLED),
    Case("medium, greedy", STORY, GREEDY),
    Case("medium, sampled, n=2", STORY, SAMPLED | {"n": 2}),
    Case("same beginning, greedy", STORY + "The third line was longer: ", GREEDY),
    Case("code, greedy", CODE, GREEDY),
    Case("numbers, sampled, top_p, top_k", NUMBERS, SAMPLED | {"top_p": 0.9, "top_k": 20}),
    Case("long, greedy", STORY * 6, GREEDY),
    Case("long, sampled, penalties", STORY * 6 + FOX, SAMPLED | {"frequency_penalty": 0.4, "presence_penalty": 0.2}),
    Case("longest, greedy, repetition", FOX * 40, GREEDY | {"repetition_penalty": 1.1}),
)
