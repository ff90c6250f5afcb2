"""How well the shipped model answers: questions with a checkable word, by sampling values, system prompt and format.

    python -m benchmarks.first_answers [--formats auto,int8,bfloat16] [--settings "default;0.2 / 0.9"] [--seeds 4]

An answer that has not ended after 400 tokens counts as a loop. Only the half `chosen` of the questions may choose a
setting, not `held out`. `over`: difference to the first row, in standard errors.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.cluster import baton_up
from benchmarks.report import parser_with_json, report
from shared.config.models.shipped_model import TEMPLATES_SYSTEM

AT_ONCE, MOST_TOKENS, TIMEOUT_S = 32, 400, 600.0
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
# question -> words of which the answer must have one. The first forty of 95 candidates, written before any was asked,
# that float32 answered rightly in at least one of eight draws; 4d94191b has all of them, and the choice (`--select`).
WORDS = {
    "What is the capital of France?": "paris",
    "What is the capital of Italy?": "rome",
    "What is the capital of Japan?": "tokyo",
    "What is the capital of Germany?": "berlin",
    "What is the capital of Spain?": "madrid",
    "What is the capital of Egypt?": "cairo",
    "What is the capital of England?": "london",
    "What is the capital of Russia?": "moscow",
    "What is the capital of China?": "beijing",
    "What is the capital of Greece?": "athens",
    "Which planet is closest to the Sun?": "mercury",
    "Which planet is known as the Red Planet?": "mars",
    "What is the largest planet in the solar system?": "jupiter",
    "Which planet has large rings?": "saturn",
    "What is the largest ocean on Earth?": "pacific",
    "What is the longest river in Africa?": "nile",
    "What is the highest mountain on Earth?": "everest",
    "On which continent is Brazil?": "south america",
    "On which continent is Kenya?": "africa",
    "Which country has the city of Sydney?": "australia",
    "What is the chemical symbol of water?": "h2o|h₂o",
    "Which gas do plants take from the air?": "carbon dioxide|co2",
    "Which gas do humans need to breathe?": "oxygen",
    "What is frozen water called?": "ice",
    "At how many degrees Celsius does water boil?": "100",
    "At how many degrees Celsius does water freeze?": "0|zero",
    "What force pulls objects towards the Earth?": "gravity|gravitational",
    "What does the Earth orbit?": "sun",
    "What orbits the Earth?": "moon",
    "How many legs does a spider have?": "8|eight",
    "How many legs does a dog have?": "4|four",
    "How many days are in a week?": "7|seven",
    "How many months are in a year?": "12|twelve",
    "How many hours are in a day?": "24|twenty-four",
    "How many minutes are in an hour?": "60|sixty",
    "How many sides does a triangle have?": "3|three",
    "How many sides does a square have?": "4|four",
    "What is 2 plus 2?": "4|four",
    "What is 5 plus 3?": "8|eight",
    "What is 3 times 3?": "9|nine",
}
QUESTIONS = tuple(WORDS)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a request says. `system`: None leaves the system prompt to the server."""

    fields: dict[str, Any] = field(default_factory=dict)
    system: str | None = None


def sampled(temperature: float, top_p: float = 1.0, **more: float) -> dict[str, Any]:
    return NEUTRAL | {"temperature": temperature, "top_p": top_p, **more}


SYSTEMS = {
    "": TEMPLATES_SYSTEM,
    ", blank": " ",
    ", helpful": "You are a helpful assistant.",
    ", brief": "Answer the question in one short sentence.",
    ", facts": "You are a helpful assistant. Answer with correct facts.",
}
SAMPLINGS = {
    "1 / 1": sampled(1.0),
    "0.7 / 0.95": sampled(0.7, 0.95),
    "0.4 / 0.9": sampled(0.4, 0.9),
    "0.2 / 0.9": sampled(0.2, 0.9),
    "0.2 / 0.9, penalty 1.1": sampled(0.2, 0.9, repetition_penalty=1.1),
    "0": sampled(0.0),
    "0, penalty 1.1": sampled(0.0, repetition_penalty=1.1),
}
SETTINGS = {"default": Setting()} | {
    values + prompt: Setting(fields, system)
    for prompt, system in SYSTEMS.items()
    for values, fields in SAMPLINGS.items()
}
FLAGS = {
    "auto": (),
    "file": ("--weight-dtype", "file"),
    "int8": ("--weight-dtype", "int8"),
    "codes": ("--weight-dtype", "codes"),
    "bfloat16": ("--dtype", "bfloat16"),
    "float32": ("--dtype", "float32"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    num_tokens: int
    has_ended: bool


def is_right(question: str, text: str) -> bool:
    words = "|".join(map(re.escape, WORDS[question].split("|")))
    return re.search(rf"(?<!\w)(?:{words})(?!\w)", text.lower()) is not None


async def ask_all(port: int, setting: Setting, seeds: Sequence[int]) -> list[list[Answer]]:
    limit = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:

        async def ask(question: str, seed: int) -> Answer:
            messages = [{"role": "user", "content": question}]
            if setting.system is not None:
                messages.insert(0, {"role": "system", "content": setting.system})
            body = {"messages": messages, "seed": seed, "max_tokens": MOST_TOKENS, **setting.fields}
            async with limit:
                answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
            choice = answer["choices"][0]
            is_whole = choice["finish_reason"] == "stop"
            return Answer(choice["message"]["content"], answer["usage"]["completion_tokens"], is_whole)

        made = await asyncio.gather(*(ask(question, seed) for question in QUESTIONS for seed in seeds))
    return [made[start : start + len(seeds)] for start in range(0, len(made), len(seeds))]


def shares(answers: Sequence[Sequence[Answer]]) -> list[float]:
    return [
        statistics.mean(is_right(question, one.text) for one in own)
        for question, own in zip(QUESTIONS, answers, strict=True)
    ]


def figures_of(answers: Sequence[Sequence[Answer]], first: Sequence[float]) -> dict[str, float]:
    right, every = shares(answers), [one for own in answers for one in own]
    gains = [own - before for own, before in zip(right, first or right, strict=True)]
    error = statistics.stdev(gains) / len(gains) ** 0.5
    return {
        "right": statistics.mean(right),
        "chosen": statistics.mean(right[0::2]),
        "held out": statistics.mean(right[1::2]),
        "loops": statistics.mean(not one.has_ended for one in every),
        "tokens": statistics.mean(one.num_tokens for one in every),
        "over": statistics.mean(gains) / error if error else 0.0,
    }


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--formats", default="auto", help=f"of {', '.join(FLAGS)}")
    parser.add_argument("--settings", default="", help="names of SETTINGS, separated by semicolons; empty: all")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--defaults", default="model", help="the router's --sampling-defaults")
    parser.add_argument("--show", action="store_true", help="print the answers")
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    first: list[float] = []
    for form in args.formats.split(","):
        with baton_up("--sampling-defaults", args.defaults, *FLAGS[form]) as port:
            for name in map(str.strip, args.settings.split(";")) if args.settings else SETTINGS:
                began = time.monotonic()
                answers = asyncio.run(ask_all(port, SETTINGS[name], range(args.seeds)))
                figures[f"{form}: {name}"] = found = figures_of(answers, first)
                first = first or shares(answers)
                took = time.monotonic() - began
                print(
                    f"{form}: {name}",
                    *(f"{key} {value:.3f}" for key, value in found.items()),
                    f"{took:.0f} s",
                    flush=True,
                )
                if args.show:
                    print(
                        *(f"    {q} {a.text[:150]!r}" for q, own in zip(QUESTIONS, answers, strict=True) for a in own),
                        sep="\n",
                    )
    report(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
