"""The requests to a running server, and the ways in which they are sent. Only fields of OpenAI's API."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deploy.tools.prove.cases import CODE, FOX, NUMBERS, STORY

Kind = Literal["greedy", "seeded", "structured"]
KINDS: tuple[Kind, ...] = ("greedy", "seeded", "structured")
STRUCTURED_TOKENS = 96  # enough for an object of the schema, with spaces
NUM_FILLERS = 6
STAGGER_S = 0.25
SEED, OTHER_SEED = 7, 8
SEEDED_ONE, SEEDED_OTHER = "seeded", "seeded, another seed"
# Without free text, so that each answer ends by itself.
PROPERTIES: dict[str, dict[str, Any]] = {
    "weather": {"type": "string", "enum": ["sun", "rain", "fog", "storm"]},
    "boats": {"type": "integer", "enum": [0, 1, 2, 3, 5, 8, 13]},
    "harbour_open": {"type": "boolean"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "day", "strict": True, "schema": SCHEMA}}
GREEDY: dict[str, Any] = {"temperature": 0.0}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": SEED}
DAY = "Describe this day at the harbour as a JSON object with weather, boats and harbour_open: "


@dataclass(frozen=True, slots=True)
class Ask:
    name: str
    kind: Kind
    prompt: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Way:
    """How a list of requests is sent. `offsets`: each one's start, in seconds; None: one after another."""

    name: str
    streamed: bool = True
    offsets: tuple[float, ...] | None = None


def make_asks(salt: str) -> list[Ask]:
    """`salt` begins each prompt, so that a server that is asked for the first time has nothing cached."""
    long = STORY * 5
    plain = [
        Ask("short", "greedy", FOX, GREEDY),
        Ask("medium", "greedy", STORY, GREEDY),
        Ask("code", "greedy", CODE, GREEDY),
        Ask("long", "greedy", long, GREEDY),
        Ask(SEEDED_ONE, "seeded", STORY, SEEDED),
        Ask(SEEDED_OTHER, "seeded", STORY, SEEDED | {"seed": OTHER_SEED}),  # with the prompt of the one before
        Ask("seeded, top_p", "seeded", NUMBERS, SEEDED | {"top_p": 0.9}),
        Ask("seeded, penalties", "seeded", FOX, SEEDED | {"frequency_penalty": 0.4, "presence_penalty": 0.2}),
        Ask("JSON", "structured", DAY + STORY, GREEDY | {"response_format": FORMAT}),
        Ask("JSON, seeded", "structured", DAY + FOX, SEEDED | {"response_format": FORMAT}),
    ]
    asks = [Ask(one.name, one.kind, f"{salt}{i}: {one.prompt}", one.fields) for i, one in enumerate(plain)]
    asks[5] = replace(asks[5], prompt=asks[4].prompt)
    beginning = asks[3].prompt
    return [*asks, Ask("long, the same beginning", "greedy", beginning + "The third line was longer: ", GREEDY)]


def make_fillers(salt: str) -> list[Ask]:
    """Return the crowd's other requests, whose answers are not compared."""
    return [Ask(f"filler {i}", "seeded", f"{salt}f{i}: {STORY * (i % 3 + 1)}", SEEDED) for i in range(NUM_FILLERS)]


def staggered(num: int) -> tuple[float, ...]:
    """Return start times that let requests join a running batch: each up to STAGGER_S after the one before."""
    rng = random.Random(11)
    at, offsets = 0.0, list[float]()
    for _ in range(num):
        offsets.append(at)
        at += rng.uniform(0.0, STAGGER_S)
    return tuple(offsets)


def limit_of(ask: Ask, max_tokens: int) -> int:
    return STRUCTURED_TOKENS if ask.kind == "structured" else max_tokens


def valid_day(value: Any) -> bool:
    """Return whether a parsed answer fits SCHEMA."""
    return (
        isinstance(value, dict)
        and value.keys() == PROPERTIES.keys()
        and value["weather"] in PROPERTIES["weather"]["enum"]
        and value["boats"] in PROPERTIES["boats"]["enum"]
        and isinstance(value["boats"], int)
        and not isinstance(value["boats"], bool)
        and isinstance(value["harbour_open"], bool)
    )
