"""Make sessions of turns: drawn by a seed, read from a file, or golden. Pure except for the file."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.tools.traffic.workloads.lengths import NO_PAUSE, ONE, DrawnLengths, Pauses
from shared.core.errors import ConfigError

WORD_LIST = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know get through back "
    "much before go good new write our used me man too any day same right look think also around another came come "
    "work three word must because does part even place well such here take why things help put years different away "
    "again off went old number great tell men say small every found still between name should home big give air line "
    "set own under read last never us left end along while might next sound below saw something thought both few "
    "those always looked show large often together asked house world going want school important until form food keep "
    "children feet land side without boy once animals life enough took sometimes four head above kind began almost "
    "live page got earth need far hand high year mother light parts country father let night following picture being "
    "study second eyes soon times story boys since white days ever paper hard near sentence better best across during "
    "today others however sure means knew try told young miles sun ways thing whole hear example heard several change "
    "answer room sea against top turned learn point city play toward five using himself usually"
)
WORDS = tuple(WORD_LIST.split())


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's text, sent `think_s` after the previous answer.

    `beside`: texts sent at the same time with the same history, as by an agent that asks several others.
    """

    text: str
    max_tokens: int
    think_s: float = 0.0
    beside: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text, *self.beside)


@dataclass(frozen=True, slots=True)
class Session:
    """`opening`: (role, text) messages before the first turn, e.g. a shared prefix."""

    turns: tuple[Turn, ...]
    opening: tuple[tuple[str, str], ...] = ()
    probe: int | None = None  # number of the golden prompt; None for other sessions
    has_tools: bool = False  # an agent's: each turn but the last ends with a call of a tool


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Drawn sessions, each with one of `prefix_groups` prefixes of `prefix_tokens` words."""

    prompt: DrawnLengths
    output: DrawnLengths
    turns: DrawnLengths
    think: Pauses = NO_PAUSE
    prefix_tokens: int = 0
    prefix_groups: int = 1
    fan_out: DrawnLengths = ONE
    has_tools: bool = False

    def sessions(self, seed: int) -> Iterator[Session]:
        prefixes = [text_of(random.Random(f"{seed} prefix {i}"), self.prefix_tokens) for i in range(self.prefix_groups)]
        for number in itertools.count():
            yield self._session(random.Random(f"{seed} session {number}"), prefixes)

    def _session(self, rng: random.Random, prefixes: Sequence[str]) -> Session:
        opening = (("system", rng.choice(prefixes)),) if self.prefix_tokens else ()
        turns = tuple(self._turn(rng, number) for number in range(self.turns.draw(rng)))
        return Session(turns, opening, has_tools=self.has_tools)

    def _turn(self, rng: random.Random, number: int) -> Turn:
        think_s = self.think.draw(rng) if number else 0.0
        num_texts = self.fan_out.draw(rng) if number else 1
        text, *beside = (text_of(rng, self.prompt.draw(rng)) for _ in range(num_texts))
        return Turn(text, self.output.draw(rng), think_s, tuple(beside))


def text_of(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


@dataclass(frozen=True, slots=True)
class PromptTurn:
    messages: tuple[tuple[str, str], ...]  # the last one is the first turn's text
    later: tuple[str, ...] = field(default=())  # the user's later texts, each after an answer
    max_tokens: int = 0  # of each answer; if 0, the limit is drawn from the run's own distribution


@dataclass(frozen=True, slots=True)
class FromFile:
    asked: tuple[PromptTurn, ...]
    output: DrawnLengths
    think: Pauses = NO_PAUSE

    def sessions(self, seed: int) -> Iterator[Session]:
        for number, asked in enumerate(itertools.cycle(self.asked)):
            rng = random.Random(f"{seed} answer {number}")
            texts = (asked.messages[-1][1], *asked.later)
            turns = tuple(
                Turn(text, asked.max_tokens or self.output.draw(rng), self.think.draw(rng) if i else 0.0)
                for i, text in enumerate(texts)
            )
            yield Session(turns, asked.messages[:-1])


def read_prompts(path: Path) -> tuple[PromptTurn, ...]:
    """Read a prompt per line. Raise ConfigError for an invalid line.

    A .jsonl line has `prompt`, `messages` or `turns` (a user's texts), and perhaps `max_tokens`.
    """
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from None
    if not lines:
        raise ConfigError(f"--prompts {path}: it is empty")
    if path.suffix != ".jsonl":
        return tuple(PromptTurn((("user", line),)) for line in lines)
    return tuple(asked_of(path, number, line) for number, line in enumerate(lines, 1))


def asked_of(path: Path, number: int, line: str) -> PromptTurn:
    try:
        row = json.loads(line)
        max_tokens = int(row.get("max_tokens", 0))
        if "turns" in row:
            first, *later = map(str, row["turns"])
            return PromptTurn((("user", first),), tuple(later), max_tokens)
        return PromptTurn(messages_of(row), (), max_tokens)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"--prompts {path}, line {number}: it must be an object with prompt, messages or turns, "
            'like {"prompt": "Why?", "max_tokens": 64}'
        ) from None


def messages_of(row: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    if "prompt" in row:
        return (("user", str(row["prompt"])),)
    messages = tuple((str(message["role"]), str(message["content"])) for message in row["messages"])
    if not messages:
        raise ValueError("no message")
    return messages


def with_probes(sessions: Iterator[Session], probes: Sequence[Session], every: int) -> Iterator[Session]:
    asked = itertools.cycle(probes)
    for number, session in enumerate(sessions, 1):
        yield next(asked) if probes and number % every == 0 else session
