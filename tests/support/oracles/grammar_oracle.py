"""Grammars for HashLM, and what each allows, asked anew from its beginning for every token."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from router.text.grammars import of_choices
from router.tools.calls.formats import BY_NAME
from router.tools.grammar import tool_grammar
from router.tools.schemas.choice import ChoiceMode, ToolChoice
from router.tools.schemas.declared import parse_tools
from shared.config.models.vocabulary import hashlm_vocabulary
from shared.core.sampling_params import SamplingParams
from shared.device.cpu import do_nothing
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.grammars import Grammars
from tests.support.oracles.hashlm_reference import Allows

VOCABULARY = hashlm_vocabulary()
COMPILER = GrammarCompiler(VOCABULARY)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA)
REGEXES = (r"[0-9]{3}-[a-f]{4}", r"(yes|no|maybe)( (yes|no|maybe))*", r"[^a]{1,60}", r"(ab|abc|abcd|a[x-z]+)+!")
CALLS = tool_grammar(
    BY_NAME["llama3_json"],
    ToolChoice(
        ChoiceMode.REQUIRED,
        parse_tools(
            [
                {"type": "function", "name": "weather", "parameters": SCHEMA},
                {"type": "function", "name": "stop"},
            ]
        ).tools,
    ),
    allows_parallel=False,
)
assert CALLS is not None
KINDS = {
    "json": (JSON,),
    "regex": tuple(map(LLMatcher.grammar_from_regex, REGEXES)),
    "choice": (of_choices(["yes", "no", "yesterday", "not at all"]),),
    "tool": (LLMatcher.grammar_from_lark(CALLS),),
}
GRAMMARS = tuple(itertools.chain.from_iterable(KINDS.values()))


class AtOnce(Executor):
    """Compiles on the calling thread, so that a test sees the same order of things each time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Later(Executor):
    """Compiles, and makes slow masks, when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args, **kwargs))

        self.waiting.append(run)
        return future

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()

    def before(self, step: Callable[..., bool], seed: int) -> Callable[..., bool]:
        """Return a loop's `step` that runs some of the jobs first."""
        rng = random.Random(seed)

        def run_some(*args: Any, **kwargs: Any) -> bool:
            while self.waiting and rng.random() < 0.4:
                self.waiting.pop(0)()
            return step(*args, **kwargs)

        return run_some


class Seconds:
    """A clock. Each mask takes one of `costs`."""

    def __init__(self, costs: Iterable[float]) -> None:
        self._ticks = itertools.accumulate(itertools.chain.from_iterable((cost, 0.0) for cost in costs), initial=0.0)

    def __call__(self) -> float:
        return next(self._ticks)


def always(cost_s: float) -> Seconds:
    return Seconds(itertools.repeat(cost_s))


def drawn_costs(seed: int) -> Seconds:
    """Cheap, slow, and so that a few are cheap together."""
    rng = random.Random(seed)
    return Seconds(rng.choice([0.0, 0.0, 0.002, 0.05]) for _ in itertools.count())


class InItsTime(Executor):
    """Compiles at once, and is known to have done so when `after` calls what it is given."""

    def __init__(self, after: Callable[[Callable[[], None]], None]) -> None:
        self._after = after

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        result = fn(*args, **kwargs)

        def known() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(result)

        self._after(known)
        return future


def make_grammars(
    executor: Executor | None = None, wake: Callable[[], None] = do_nothing, clock: Callable[[], float] = float
) -> Grammars:
    """`clock`: what masks cost; by default nothing."""
    return Grammars(COMPILER, VOCABULARY.eos_ids, wake, executor or AtOnce(), clock)


@functools.cache
def _compiled(grammar: str) -> LLMatcher:
    return COMPILER.compile(grammar)


def mask_bits(matcher: LLMatcher) -> npt.NDArray[np.bool_]:
    """(vocabulary,) which ids the matcher allows next."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return bits[: len(VOCABULARY.tokens)].astype(np.bool_)


def allows_of(grammar: str) -> Allows | None:
    """What a reference asks. Nothing is carried from token to token: no matcher of the engine can share its faults."""
    if not grammar:
        return None

    def allows(emitted: Sequence[int]) -> npt.NDArray[np.bool_]:
        matcher = _compiled(grammar).deep_copy()
        assert matcher.consume_tokens(list(emitted)), f"{emitted}: {matcher.get_error()}"
        return mask_bits(matcher)

    return allows


def draw_grammar(rng: random.Random) -> str:
    return rng.choice(GRAMMARS)


def following(sampling: SamplingParams, grammar: str) -> SamplingParams:
    """The same under a grammar, which ends with the model's own end."""
    return replace(sampling, grammar=grammar, stop_token_ids=VOCABULARY.eos_ids, allowed_token_ids=())
