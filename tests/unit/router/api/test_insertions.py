"""What clients insert into system prompts for billing or caching is cut, and nothing else."""

from __future__ import annotations

import string
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.anthropic.messages import MESSAGES, conversation_of
from router.api.ask.insertions import without_insertion
from router.api.ask.parts import Parts
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT
from router.api.openai.chat_messages import turns_of as chat_turns
from router.api.openai.responses import RESPONSES
from router.api.openai.responses_input import turns_of as responses_turns

BILLING = "x-anthropic-billing-header: cc_version=0.0.0; cc_entrypoint=cli; cch=00000;"

names = st.sampled_from(["x-anthropic-billing-header:", "x-anthropic-cache-header:", "x-anthropic-header:"])
keys = st.text(string.ascii_letters, min_size=1, max_size=9) | st.just("cc_version")
values = st.text(st.characters(exclude_characters=";", exclude_categories=["Z", "C"]), max_size=9)
pairs = st.tuples(st.sampled_from(["", " ", "\t"]), keys, values).map(lambda pair: f"{pair[0]}{pair[1]}={pair[2]};")
insertions = st.tuples(names, st.lists(pairs, min_size=1, max_size=4).map("".join)).map("".join)
ends = st.sampled_from(["", "\n", "\r\n"])
# a prompt begins with a letter and holds no `=`, so that none of it could be a pair or a line end
prompts = st.text(st.characters(exclude_characters="=", exclude_categories=["C"]) | st.just("\n"), max_size=20).map(
    lambda text: f"Be {text}"
)
blocks = st.lists(st.tuples(st.just("") | st.tuples(insertions, ends).map("".join), st.just("") | prompts), max_size=6)


def messages_system(**body: Any) -> str:
    """The text of the first turn, if it is a system turn."""
    sent = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | body
    turns = conversation_of(BodyParser(MESSAGES).parse(msgspec.json.encode(sent)).body, (), Parts()).messages
    return str(turns[0]["content"]) if turns and turns[0]["role"] == "system" else ""


def chat_system(content: object, role: str = "system") -> str:
    sent = {"messages": [{"role": role, "content": content}]}
    return str(chat_turns(BodyParser(CHAT).parse(msgspec.json.encode(sent)).body.messages, Parts())[0]["content"])


def responses_system(**body: Any) -> str:
    parsed = BodyParser(RESPONSES).parse(msgspec.json.encode({"input": "hi"} | body)).body
    turns = responses_turns(parsed.instructions, parsed.input, Parts())
    return str(turns[0]["content"]) if turns else ""


def parts(texts: list[str], kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


@given(blocks)
def test_only_insertions_are_lost_from_any_blocks(made: list[tuple[str, str]]) -> None:
    sent = [insertion + prompt for insertion, prompt in made]
    joined = "".join(prompt for _, prompt in made)
    assert messages_system(system=parts(sent)) == joined
    assert messages_system(messages=[{"role": "system", "content": parts(sent)}]) == joined
    assert chat_system(parts(sent)) == joined
    assert responses_system(input=[{"role": "developer", "content": parts(sent, "input_text")}]) == joined


@given(insertions, ends, prompts)
def test_an_insertion_is_cut_to_the_letter(insertion: str, end: str, prompt: str) -> None:
    assert without_insertion(insertion + end) == ""
    assert without_insertion(insertion + end + prompt) == prompt
    assert without_insertion(insertion + end + insertion + prompt) == prompt


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (BILLING, ""),
        (f"{BILLING}You are", "You are"),
        (f"{BILLING} You are", " You are"),
        (f"{BILLING}\nYou are", "You are"),
        (f"{BILLING}\n\nYou are", "\nYou are"),
        (f"{BILLING}\r\nYou are", "You are"),
        (f"{BILLING} \nYou are", "You are"),
        (f"{BILLING} x=1 is the rule", " x=1 is the rule"),
        (f"{BILLING} x = 1; y", " x = 1; y"),
        ("x-anthropic-billing-header: account=abc; cch=12345", ""),
        ("x-anthropic-billing-header: account=abc; cch=12345\nYou are", "You are"),
        ("x-anthropic-billing-header: account=abc", ""),
        ("x-anthropic-billing-header: is a header", "x-anthropic-billing-header: is a header"),
        ("x-anthropic-billing-header:", "x-anthropic-billing-header:"),
        (f" {BILLING}", f" {BILLING}"),
        (f"Never write {BILLING}", f"Never write {BILLING}"),
        ("x-request-id: a=b;", "x-request-id: a=b;"),
    ],
)
def test_where_an_insertion_ends(text: str, kept: str) -> None:
    assert without_insertion(text) == kept


def test_every_place_of_a_system_prompt_is_cleared() -> None:
    said = f"{BILLING}\nBe brief."
    assert messages_system(system=said) == messages_system(messages=[{"role": "system", "content": said}])
    assert {messages_system(system=said), chat_system(said), responses_system(instructions=said)} == {"Be brief."}


def test_a_user_may_write_what_clients_insert() -> None:
    assert chat_system(BILLING, "user") == BILLING
    sent = {"role": "user", "content": parts([BILLING, "what is this?"])}
    assert messages_system(system="", messages=[sent, sent]) == ""
    assert responses_system(input=BILLING) == BILLING
