"""Answers under a thousand drawn schemas and two hundred regular expressions, by HashLM with a vocabulary of pieces
that end in the middle of characters and across a grammar's borders. Others say whether they fit."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from router.text import grammars
from shared.config.models.pieces import make_pieces
from shared.core.sampling_params import SamplingParams
from shared.device.cpu import do_nothing
from shared.grammar.compiler import GrammarCompiler
from shared.grammar.grammars import Grammars
from shared.model.hashlm.model import HashLM
from tests.support.bodies.drawn_schemas import draw_possible, draw_regex, fits_regex, fits_schema
from tests.support.cores.core_rig import MAX_CONTEXT, CoreKnobs, Job, assert_whole, make_core, run_local
from tests.support.oracles.grammar_oracle import AtOnce

PIECES = make_pieces()
COMPILER = GrammarCompiler(PIECES.vocabulary)
MOST_TOKENS = 200
NUM_SCHEMAS, NUM_REGEXES = 1000, 200
LEAST_ENDED = 0.9
PER_CORE = 100


@dataclass(frozen=True)
class Drawn:
    """`fits`: whether a text, whole or only begun, is what was asked for."""

    what: str
    grammar: str
    fits: Callable[[str, bool], bool]


def schemas() -> Iterator[Drawn]:
    rng = random.Random(16)
    while True:
        schema, grammar = draw_possible(rng)
        yield Drawn(
            json.dumps(schema), grammar, lambda text, whole, schema=schema: not whole or fits_schema(text, schema)
        )


def regexes() -> Iterator[Drawn]:
    rng = random.Random(17)
    while True:
        pattern = draw_regex(rng)
        fits = lambda text, whole, pattern=pattern: fits_regex(text, pattern, is_whole=whole)  # noqa: E731
        yield Drawn(pattern, grammars.of_regex(pattern), fits)


@pytest.mark.parametrize(("source", "count"), [(schemas, NUM_SCHEMAS), (regexes, NUM_REGEXES)])
def test_answers_fit_what_was_asked_for(
    source: Callable[[], Iterator[Drawn]], count: int, figures: Callable[[str], None]
) -> None:
    """None gets stuck, most end by themselves, and the others are beginnings of what would fit."""
    drawn = [one for one, _ in zip(source(), range(count), strict=False)]
    ends: Counter[str] = Counter()
    for first in range(0, count, PER_CORE):
        ends += answers_to(drawn[first : first + PER_CORE], first)
    figures(f"{source.__name__}: {ends['stop']} of {count} ended by themselves, {ends['length']} were cut")
    assert ends["stop"] + ends["length"] == count
    assert ends["stop"] >= LEAST_ENDED * count


def answers_to(drawn: list[Drawn], first: int) -> Counter[str]:
    model = HashLM(len(PIECES.vocabulary.tokens), MAX_CONTEXT)
    own = Grammars(COMPILER, PIECES.vocabulary.eos_ids, do_nothing, AtOnce())
    core = make_core(CoreKnobs(num_pages=600, max_running=16), model=model, grammars=own)
    jobs = [Job(first + i, (7, i, first % 256), sampling_of(one, i), seed=first + i) for i, one in enumerate(drawn)]
    outcome = run_local(core, jobs)
    ends: Counter[str] = Counter()
    for job, one in zip(jobs, drawn, strict=True):
        ids, end = outcome.streams[f"r{job.rid}"], outcome.ends[f"r{job.rid}"]
        assert end.error is None, f"{one.what}: {end.error}"
        is_whole = end.reason.value == "stop"
        text = PIECES.decode(ids).decode(errors="strict" if is_whole else "ignore")
        assert one.fits(text, is_whole), f"{one.what}: {text!r}"
        assert is_whole == (ids[-1] == PIECES.eos_id)
        if not is_whole:
            assert len(ids) == MOST_TOKENS and COMPILER.compile(one.grammar).try_consume_tokens(ids) == len(ids)
        ends[end.reason.value] += 1
    assert_whole(core)
    core.close()
    return ends


def sampling_of(drawn: Drawn, number: int) -> SamplingParams:
    stop = PIECES.vocabulary.eos_ids
    return SamplingParams(MOST_TOKENS, temperature=number % 2 * 0.8, grammar=drawn.grammar, stop_token_ids=stop)
