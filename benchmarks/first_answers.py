"""How well the shipped model answers: questions with a checkable word, by sampling values, system prompt and format.

    python -m benchmarks.first_answers [--formats auto,int8,bfloat16] [--settings "default;0.2 / 0.9"] [--seeds 4]
    python -m benchmarks.first_answers --select     which candidates float32 answers rightly in one of eight draws

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
# (question, words of which the answer must have one). Written before any was asked.
CANDIDATES: tuple[tuple[str, str], ...] = (
    ("What is the capital of France?", "paris"),
    ("What is the capital of Italy?", "rome"),
    ("What is the capital of Japan?", "tokyo"),
    ("What is the capital of Germany?", "berlin"),
    ("What is the capital of Spain?", "madrid"),
    ("What is the capital of Egypt?", "cairo"),
    ("What is the capital of England?", "london"),
    ("What is the capital of Russia?", "moscow"),
    ("What is the capital of China?", "beijing"),
    ("What is the capital of Greece?", "athens"),
    ("Which planet is closest to the Sun?", "mercury"),
    ("Which planet is known as the Red Planet?", "mars"),
    ("What is the largest planet in the solar system?", "jupiter"),
    ("Which planet has large rings?", "saturn"),
    ("What is the largest ocean on Earth?", "pacific"),
    ("What is the longest river in Africa?", "nile"),
    ("What is the highest mountain on Earth?", "everest"),
    ("On which continent is Brazil?", "south america"),
    ("On which continent is Kenya?", "africa"),
    ("Which country has the city of Sydney?", "australia"),
    ("What is the chemical symbol of water?", "h2o|h₂o"),
    ("Which gas do plants take from the air?", "carbon dioxide|co2"),
    ("Which gas do humans need to breathe?", "oxygen"),
    ("What is frozen water called?", "ice"),
    ("At how many degrees Celsius does water boil?", "100"),
    ("At how many degrees Celsius does water freeze?", "0|zero"),
    ("What force pulls objects towards the Earth?", "gravity|gravitational"),
    ("What does the Earth orbit?", "sun"),
    ("What orbits the Earth?", "moon"),
    ("How many legs does a spider have?", "8|eight"),
    ("How many legs does a dog have?", "4|four"),
    ("How many days are in a week?", "7|seven"),
    ("How many months are in a year?", "12|twelve"),
    ("How many hours are in a day?", "24|twenty-four"),
    ("How many minutes are in an hour?", "60|sixty"),
    ("How many sides does a triangle have?", "3|three"),
    ("How many sides does a square have?", "4|four"),
    ("What is 2 plus 2?", "4|four"),
    ("What is 5 plus 3?", "8|eight"),
    ("What is 10 minus 4?", "6|six"),
    ("What is 3 times 3?", "9|nine"),
    ("Which day comes after Monday?", "tuesday"),
    ("Which month comes after March?", "april"),
    ("Which season comes after winter?", "spring"),
    ("What is the opposite of hot?", "cold"),
    ("What is the opposite of big?", "small|little|tiny"),
    ("What is the opposite of day?", "night"),
    ("What is the opposite of up?", "down"),
    ("What color do you get when you mix blue and yellow?", "green"),
    ("What color do you get when you mix red and white?", "pink"),
    ("What is the color of the sky on a clear day?", "blue"),
    ("What is the color of grass?", "green"),
    ("What is the color of a ripe banana?", "yellow"),
    ("What is the color of snow?", "white"),
    ("Which animal says meow?", "cat|cats"),
    ("Which animal says moo?", "cow|cows|cattle"),
    ("What is a baby dog called?", "puppy|puppies|pup"),
    ("What is a baby cat called?", "kitten|kittens"),
    ("What do bees make?", "honey"),
    ("What do cows give us to drink?", "milk"),
    ("Which organ pumps blood through the body?", "heart"),
    ("Which organ do we use to think?", "brain"),
    ("With which organ do we see?", "eye|eyes"),
    ("What do we call a doctor for teeth?", "dentist"),
    ("Who wrote Romeo and Juliet?", "shakespeare"),
    ("Who painted the Mona Lisa?", "leonardo|vinci"),
    ("Who was the first president of the United States?", "washington"),
    ("Who developed the theory of relativity?", "einstein"),
    ("Who was the first person to walk on the Moon?", "armstrong"),
    ("Who discovered penicillin?", "fleming"),
    ("Who invented the telephone?", "bell"),
    ("Who wrote the theory of evolution by natural selection?", "darwin"),
    ("In which year did the Second World War end?", "1945"),
    ("What language is spoken in Brazil?", "portuguese"),
    ("What language is spoken in Mexico?", "spanish"),
    ("What is the currency of Japan?", "yen"),
    ("What is the currency of the United States?", "dollar|dollars|usd"),
    ("In which country are the pyramids of Giza?", "egypt"),
    ("In which city is the Eiffel Tower?", "paris"),
    ("In which country is the Great Wall?", "china"),
    ("In which city is the Statue of Liberty?", "new york"),
    ("Which metal is liquid at room temperature?", "mercury"),
    ("What is the hardest natural material?", "diamond|diamonds"),
    ("What is the process by which plants make food from light?", "photosynthesis"),
    ("What is the largest animal in the world?", "whale|whales"),
    ("What is the fastest land animal?", "cheetah|cheetahs"),
    ("What is the tallest animal?", "giraffe|giraffes"),
    ("What do you use to write on paper?", "pen|pencil|pens|pencils"),
    ("What is the plural of mouse?", "mice"),
    ("What is the past tense of go?", "went"),
    ("What is the name of the star at the center of our solar system?", "sun"),
    ("Which meal do people eat in the morning?", "breakfast"),
    ("What is the main ingredient of bread?", "flour|wheat"),
    ("Which vitamin do we get from oranges?", "c"),
    ("What do caterpillars turn into?", "butterfly|butterflies|moth|moths"),
)
# The first forty candidates that float32 answered rightly in at least one of eight draws (`--select`).
NEVER_RIGHT = "What is 10 minus 4?"
QUESTIONS = tuple(question for question, _ in CANDIDATES[:41] if question != NEVER_RIGHT)


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
    words = dict(CANDIDATES)[question]
    return re.search(rf"(?<!\w)(?:{'|'.join(map(re.escape, words.split('|')))})(?!\w)", text.lower()) is not None


async def ask_all(port: int, setting: Setting, questions: Sequence[str], seeds: Sequence[int]) -> list[list[Answer]]:
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

        made = await asyncio.gather(*(ask(question, seed) for question in questions for seed in seeds))
    return [made[start : start + len(seeds)] for start in range(0, len(made), len(seeds))]


def shares(questions: Sequence[str], answers: Sequence[Sequence[Answer]]) -> list[float]:
    return [
        statistics.mean(is_right(question, one.text) for one in own)
        for question, own in zip(questions, answers, strict=True)
    ]


def figures_of(answers: Sequence[Sequence[Answer]], first: Sequence[float]) -> dict[str, float]:
    right, every = shares(QUESTIONS, answers), [one for own in answers for one in own]
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


def select() -> int:
    questions, rights = [question for question, _ in CANDIDATES], [0.0] * len(CANDIDATES)
    with baton_up(*FLAGS["float32"]) as port:
        for name in ("0.7 / 0.95", "0.7 / 0.95, blank"):
            answers = asyncio.run(ask_all(port, SETTINGS[name], questions, range(4)))
            rights = [sum(pair) for pair in zip(rights, shares(questions, answers), strict=True)]
    for question, right in zip(questions, rights, strict=True):
        print(f"{4 * right:.0f} of 8  {question}")
    kept = [question for question, right in zip(questions, rights, strict=True) if right]
    print(f"{len(kept)} of {len(questions)} candidates; the first 40:", *kept[:40], sep="\n")
    return 0


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--select", action="store_true")
    parser.add_argument("--formats", default="auto", help=f"of {', '.join(FLAGS)}")
    parser.add_argument("--settings", default="", help="names of SETTINGS, separated by semicolons; empty: all")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--defaults", default="model", help="the router's --sampling-defaults")
    parser.add_argument("--show", action="store_true", help="print the answers")
    args = parser.parse_args()
    if args.select:
        return select()
    figures: dict[str, dict[str, float]] = {}
    first: list[float] = []
    for form in args.formats.split(","):
        with baton_up("--sampling-defaults", args.defaults, *FLAGS[form]) as port:
            for name in map(str.strip, args.settings.split(";")) if args.settings else SETTINGS:
                began = time.monotonic()
                answers = asyncio.run(ask_all(port, SETTINGS[name], QUESTIONS, range(args.seeds)))
                figures[f"{form}: {name}"] = found = figures_of(answers, first)
                first = first or shares(QUESTIONS, answers)
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
