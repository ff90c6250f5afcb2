"""The scripted model says what its prompt tells it to, through any cut of the prompt and any pages; its vocabulary
spells all bytes in pieces that end anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.chat.conversation import Conversation
from router.text.chat.interface import decode_ids
from router.text.scripted import scripted_text_model
from shared.config.models.pieces import MAX_BYTES, make_pieces
from shared.config.models.vocabulary import read_vocabulary
from shared.config.processes import NodeParts
from shared.config.settings.settings import ModelConfig, ParallelConfig, SpecConfig
from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.model.scripted import ScriptedLM, script_of
from shared.node.loop.node import Node
from tests.support.cores.core_rig import CoreKnobs, Job, assert_whole, make_core, run_local
from tests.support.worlds.node_pair import Net, assert_clean, make_node

PIECES = make_pieces()
TEXT = scripted_text_model()
EOS = PIECES.eos_id
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "über": [1, null]}}</tool_call>'
SCRIPTS = ["", "hi", CALL, "naïve 你好 😀!", "a user said so", "x" * 70]


def prompt_of(*turns: tuple[str, str]) -> tuple[int, ...]:
    messages = [{"role": role, "content": content} for role, content in turns]
    return tuple(TEXT.tokenizer.encode(TEXT.template.render(Conversation(messages)), add_special=False))


def job(rid: int, prompt: tuple[int, ...], max_tokens: int = 200) -> Job:
    return Job(rid, prompt, SamplingParams(max_tokens, temperature=0.8, stop_token_ids=(EOS,)), rid)


def said(ids: list[int]) -> str:
    assert ids[-1] == EOS
    return decode_ids(TEXT.tokenizer, ids[:-1])


@given(st.binary(max_size=40) | st.text(max_size=20).map(lambda text: text.encode(errors="replace")))
def test_pieces_spell_all_bytes(data: bytes) -> None:
    ids = PIECES.encode(data)
    assert PIECES.decode(ids) == data and len(ids) <= len(data)


def test_pieces_are_of_all_lengths_and_cut_characters() -> None:
    *tokens, _ = PIECES.vocabulary.tokens
    assert len(set(tokens)) == len(tokens) > 400 and {len(token) for token in tokens} == set(range(1, MAX_BYTES + 1))
    assert b'":{' in tokens and sum(b"\xe4" in token or b"\x9f" in token for token in tokens) > 8
    assert read_vocabulary("scripted") == PIECES.vocabulary


@pytest.mark.parametrize(
    ("turns", "answer"),
    [
        ([("user", f"please say:{CALL}")], CALL),
        ([("user", "hello")], "Nothing to say."),
        ([("system", "say:no"), ("user", "say:naïve 你 😀")], "naïve 你 😀"),
        ([("user", f"say:{CALL}"), ("assistant", CALL), ("tool", "21 C")], "The tool said: 21 C"),
        ([("user", "say:")], ""),
        ([("user", "say:a say:b")], "a say:b"),
        ([("user", "say:a"), ("system", "say:b"), ("system", "c")], "a"),
        ([("tool", "21 C"), ("system", "say:b")], "The tool said: 21 C"),
        ([("system", "say:b")], "b"),
    ],
)
@pytest.mark.parametrize("knobs", [{}, {"chunk_size": 3, "page_size": 1}, {"spec": "ngram", "width": 4}], ids=str)
def test_answers(turns: list[tuple[str, str]], answer: str, knobs: dict[str, object]) -> None:
    core = make_core(CoreKnobs(num_pages=900, **knobs), model=ScriptedLM())  # type: ignore[arg-type]
    outcome = run_local(core, [job(1, prompt_of(*turns))])
    assert said(outcome.streams["r1"]) == answer
    assert_whole(core)
    core.close()


def test_a_prompt_that_is_no_chat_gets_an_empty_answer() -> None:
    assert script_of(b"Once upon a time") == b""
    core = make_core(CoreKnobs(), model=ScriptedLM())
    outcome = run_local(core, [job(1, tuple(PIECES.encode(b"Once upon a time")))])
    assert outcome.streams["r1"] == [EOS]
    core.close()


def scripted_node(role: str, name: str) -> Node:
    return make_node(role, name, CoreKnobs(), core=make_core(CoreKnobs(), model=ScriptedLM()))


def test_answers_are_handed_over() -> None:
    """All pages of the prompt reach the decode node: what is said stands in them."""
    p, d = scripted_node("prefill", "p0"), scripted_node("decode", "d0")
    net = Net([p, d])
    keys = [net.generate(p, job(rid, prompt_of(("user", f"say:{script}"))), d) for rid, script in enumerate(SCRIPTS)]
    net.run()
    assert [said(net.router.streams[key]) for key in keys] == SCRIPTS
    assert_clean(p, d)


@pytest.mark.parametrize("more", [{"parallel": ParallelConfig(tp=2)}, {"spec": SpecConfig(spec="eagle")}], ids=str)
def test_it_runs_whole_and_without_a_head(more: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--model scripted can't be used with"):
        NodeParts(ModelConfig(model="scripted"), **more)  # type: ignore[arg-type]
    NodeParts(ModelConfig(model="scripted"), spec=SpecConfig(spec="ngram"))
