"""Grammars: compiled within limits, followed token by token, masks of a window as if each draft had been emitted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, grammar_from

from router.text import grammars
from router.text.load import load_text_model
from router.tools.schemas.closed_objects import prepared
from shared.config.models.vocab_bytes import Vocabulary
from shared.config.models.vocabulary import hashlm_vocabulary, read_vocabulary
from shared.core.errors import InvalidRequest, StepFailed
from shared.grammar.compiler import GrammarCompiler, _Tokens
from shared.grammar.grammars import Grammars
from tests.support.machine.growth import grows_linearly
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.oracles.grammar_oracle import (
    COMPILER,
    GRAMMARS,
    JSON,
    VOCABULARY,
    Later,
    allows_of,
    draw_grammar,
    make_grammars,
)

WORDS = COMPILER.num_words


def filled(constraint, emitted, drafts=(), parents=()) -> np.ndarray:  # noqa: ANN001
    """(1 + len(drafts), vocabulary) what a constraint allows."""
    out = np.zeros((1 + len(drafts), WORDS), np.uint32)
    constraint.fill(list(emitted), list(drafts), list(parents), out)
    return np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")[:, : len(VOCABULARY.tokens)].astype(bool)


def ready(ours: Grammars, grammar: str):  # noqa: ANN201
    constraint = ours.constraint(grammar)
    constraint._job.exception(HANG_GUARD_S)
    return constraint


def answer(grammar: str, rng: random.Random, length: int) -> list[int]:
    """Some tokens that the grammar allows, without its end."""
    allows, ids = allows_of(grammar), []
    assert allows is not None
    while len(ids) < length:
        choices = [i for i in np.flatnonzero(allows(ids)).tolist() if i not in VOCABULARY.eos_ids]
        if not choices:
            break
        ids.append(rng.choice(choices))
    return ids


@pytest.mark.parametrize("name", ["hashlm", "smollm2"])
def test_nodes_read_the_vocabulary_that_routers_write_with(name: str) -> None:
    vocabulary, text = read_vocabulary(name), load_text_model(name)
    facts = text.tokenizer.facts
    assert list(vocabulary.tokens) == [text.tokenizer.token_bytes(i) for i in range(facts.vocab_size)]
    assert vocabulary.eos_ids == facts.eos_ids and vocabulary.special_ids == facts.special_ids


def test_two_vocabularies_have_two_digests() -> None:
    first = hashlm_vocabulary()
    swapped = Vocabulary((first.tokens[1], first.tokens[0], *first.tokens[2:]), first.eos_ids, first.special_ids)
    joined = Vocabulary((first.tokens[0] + first.tokens[1], b"", *first.tokens[2:]), first.eos_ids, first.special_ids)
    ended = Vocabulary(first.tokens, (94,), first.special_ids)
    assert len({vocabulary.digest for vocabulary in (first, swapped, joined, ended)}) == 4
    assert GrammarCompiler(first).version != GrammarCompiler(swapped).version


def test_a_short_text_is_compared_with_no_longer_tokens() -> None:
    class Counted(dict[bytes, int]):
        num_asked = 0

        def __contains__(self, token: object) -> bool:
            self.num_asked += 1
            return super().__contains__(token)

    tokens = _Tokens(Vocabulary((b"a", b"b", b"x" * 500), (1,), frozenset()))
    tokens._id_of = ids = Counted(tokens._id_of)
    assert tokens(b"ab") == [0, 1] and ids.num_asked <= 3


def test_of_a_long_forced_text_only_the_beginning_becomes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of `make bodies` had 20,000 z as its pattern: its answer of 400 tokens took longer than a minute."""
    ours = make_grammars()
    constraint, num_bytes, cut = ready(ours, grammar_from("regex", "z" * 20_000)), list[int](), _Tokens.__call__

    def counted(self: _Tokens, text: bytes | str) -> Sequence[int]:
        ids = cut(self, text)
        num_bytes.append(sum(len(VOCABULARY.tokens[one]) for one in ids))
        return ids

    monkeypatch.setattr(_Tokens, "__call__", counted)
    emitted: list[int] = []
    for _ in range(8):
        filled(constraint, emitted, [1], [0])
        forced = constraint.forced
        assert forced.num_emitted == len(emitted) and len(forced.ids) >= 32, "two steps of the widest window"
        emitted.append(forced.ids[0])
    assert num_bytes and max(num_bytes) <= 1024
    ours.close()


@pytest.mark.rule("H16")
@pytest.mark.parametrize("grammar", GRAMMARS, ids=range(len(GRAMMARS)))
def test_masks_along_an_answer_are_those_of_its_beginning(grammar: str) -> None:
    """Asked at each token, at every third, and once at the end: what came before makes no difference."""
    ours, allows = make_grammars(), allows_of(grammar)
    assert allows is not None
    for step in (1, 3, 50):
        constraint, ids = ready(ours, grammar), answer(grammar, random.Random(step), 40)
        for end in range(0, len(ids) + 1, step):
            assert (filled(constraint, ids[:end])[0] == allows(ids[:end])).all()
    ours.close()


@pytest.mark.rule("H16")
@pytest.mark.parametrize("seed", range(12))
def test_masks_of_a_tree_are_those_of_each_path(seed: int) -> None:
    """Right and wrong drafts, ends among them, in chains and trees; then the answer goes on."""
    rng, ours = random.Random(seed), make_grammars()
    grammar = draw_grammar(rng)
    constraint, allows, ids = ready(ours, grammar), allows_of(grammar), answer(grammar, rng, rng.randrange(20))
    assert allows is not None
    for _ in range(4):
        drafts: list[int] = []
        parents: list[int] = []
        paths, alive = [ids], [True]
        for _ in range(rng.randrange(1, 10)):
            parent = rng.randrange(len(paths))
            choices = np.flatnonzero(allows(paths[parent])).tolist() if alive[parent] else []
            draft = rng.choice(choices) if choices and rng.random() < 0.7 else rng.randrange(len(VOCABULARY.tokens))
            drafts.append(draft)
            parents.append(parent)
            paths.append([*paths[parent], draft])
            alive.append(alive[parent] and draft in choices and draft not in VOCABULARY.eos_ids)
        try:
            masks = filled(constraint, ids, drafts, parents)
        except InvalidRequest as error:
            pytest.fail(f"drafts of {drafts} were taken for what was emitted: {error}")
        for path, is_alive, mask in zip(paths, alive, masks, strict=True):
            assert not is_alive or (mask == allows(path)).all()
        ids = max((path for path, is_alive in zip(paths, alive, strict=True) if is_alive), key=len)
    ours.close()


def test_tokens_that_do_not_follow_are_an_error() -> None:
    """A peer's word, or a fault of ours: the request ends, and nobody draws from a wrong mask."""
    ours = make_grammars()
    constraint = ready(ours, JSON)
    with pytest.raises(InvalidRequest, match="can't follow its grammar"):
        filled(constraint, [5, 6, 7])
    ours.close()


def test_what_the_vocabulary_has_no_token_for_is_said_so() -> None:
    ours = make_grammars()
    constraint = ready(ours, grammar_from("regex", "e\u00e9"))  # HashLM's tokens are ASCII
    with pytest.raises(InvalidRequest, match=r"grammar: this model has no token for what comes next there$"):
        filled(constraint, [VOCABULARY.tokens.index(b"e")])
    ours.close()


def test_a_grammar_that_can_t_be_compiled() -> None:
    ours = make_grammars()
    broken = ready(ours, LLMatcher.grammar_from_regex("(?<=a)b"))
    assert broken.is_ready and isinstance(broken.error, InvalidRequest) and "look-around" in broken.error.message
    assert ready(ours, JSON).error is None
    ours.close()


def test_a_long_answer_costs_no_other_request_its_grammar() -> None:
    """A text of a bounded length has a lexer state for each of its characters, and these are bounded: each request has
    its own."""
    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "maxLength": 100_000})
    ours = make_grammars()
    long, other = ready(ours, grammar), ready(ours, grammar)
    quote, char = VOCABULARY.tokens.index(b'"'), VOCABULARY.tokens.index(b"x")
    with pytest.raises(InvalidRequest, match="can't follow"):
        for end in range(0, 400_000, 5000):
            filled(long, [quote, *[char] * end])
    assert filled(other, [quote])[0][char]
    ours.close()


def test_what_is_not_compiled_yet_is_cancelled_with_its_request() -> None:
    executor = Later()
    ours = make_grammars(executor)
    constraint = ours.constraint(JSON)
    assert not constraint.is_ready
    constraint.cancel()
    assert constraint.is_ready
    ours.close()


def test_a_panic_ends_its_request_alone() -> None:
    """llguidance is compiled code; what it raises may be no Exception."""

    class Panic(BaseException):
        pass

    class Broken:
        def consume_tokens(self, ids: list[int]) -> bool:
            raise Panic("in compiled code")

    ours = make_grammars()
    constraint = ready(ours, JSON)
    constraint._matcher = Broken()
    with pytest.raises(StepFailed, match="Panic"):
        filled(constraint, [1])
    ours.close()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "make",
    [
        lambda: grammars.of_schema({"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        lambda: grammars.of_regex("(" * 100),
        lambda: grammars.of_grammar("start: " + " ".join(f"x{i}" for i in range(5)) + "\n"),
        lambda: grammars.of_choices(["x" * 1000] * 1000),
        lambda: grammars.of_schema("[1]"),
        *(partial(grammars.of_schema, text, prepared) for text in ("null", "true", "-1", '"a"', "[]")),
        lambda: grammars.of_schema('{"a": '),
        lambda: grammars.of_schema(nested(100)),
        lambda: grammars.of_schema({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(600)}}),
        lambda: grammars.of_schema("[" * 100_000),
        lambda: grammars.of_grammar(
            "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(3000)) + 'r3000: "b"'
        ),
    ],
)
def test_what_is_not_supported_or_monstrous_is_refused(make) -> None:  # noqa: ANN001
    with pytest.raises(InvalidRequest) as error:
        make()
    assert len(error.value.message) < 700


@pytest.mark.parametrize("space", [" ", "\n", " \n", "\u3000"])
def test_white_space_before_a_grammar_takes_linear_time(space: str) -> None:
    def refuse(num: int) -> None:
        with pytest.raises(InvalidRequest):
            grammars.of_grammar(space * num + "x" * grammars.MAX_GRAMMAR_TEXT + "x")

    assert grows_linearly(refuse, 1000)


def test_white_space_comes_to_an_end() -> None:
    """Between the parts of a JSON text: a model that likes line breaks must close its object some day."""
    grammar = grammars.of_schema({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    matcher = COMPILER.compile(grammar)
    space = VOCABULARY.tokens.index(b" ")
    taken = matcher.try_consume_tokens([VOCABULARY.tokens.index(b"{"), *[space] * 50])
    assert 0 < taken < 10
