"""The drill's chats: what each turn asks, at which router, and how much of it one node would have in cache."""

from __future__ import annotations

import itertools

from tests.drill.chats import ANSWER_TOKENS, FIRST_TOKENS, NEXT_TOKENS, PAGE_SIZE, TURNS, Chats
from tests.support.web.mixed_clients import Answer, Client

ROUTERS = ("a", "b")


def ask(chats: Chats, router: str, *, cached: int = 0, error: str = "") -> Client | None:
    """Answer whoever asks there; None: nobody does."""
    with chats.client(router, 0) as client:
        if client is not None and error:
            client.error = error
        elif client is not None:
            client.got = [Answer([7] * ANSWER_TOKENS)]
            client.usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        return client


def one_chat() -> Chats:
    chats = Chats(itertools.count(), ROUTERS, 1)
    chats._waiting["b"].clear()
    return chats


def test_each_turn_goes_on_at_the_next_router() -> None:
    chats = one_chat()
    turns = [ask(chats, router) for router in ("a", "b", "a", "b")]
    for before, turn in itertools.pairwise(turns):
        assert before and turn
        said = before.prompt + before.got[0].ids
        assert turn.prompt[: len(said)] == said
        assert len(turn.prompt) == len(said) + NEXT_TOKENS
    assert ask(chats, "b") is None


def test_a_chat_ends_and_a_new_one_begins() -> None:
    chats = one_chat()
    first, *_, new = [ask(chats, router) for router in itertools.islice(itertools.cycle(ROUTERS), TURNS + 1)]
    assert first and new
    assert len(new.prompt) == FIRST_TOKENS
    assert new.prompt != first.prompt


def test_a_router_that_broke_a_stream_is_left() -> None:
    """The turn is asked again at the other one, and all further turns too."""
    chats = one_chat()
    broken = ask(chats, "a", error="gone")
    again, then = ask(chats, "b"), ask(chats, "b")
    assert broken and again and then
    assert again.prompt == broken.prompt
    assert then.prompt[: len(again.prompt)] == again.prompt
    assert ask(chats, "a") is None
    assert chats.gone == {"a"}


def test_one_node_s_hits_are_whole_pages_of_the_turn_before() -> None:
    chats = one_chat()
    first, second = ask(chats, "a"), ask(chats, "b", cached=32)
    ask(chats, "a", error="gone")  # broken: counts for nothing
    assert first and second
    asked, known = len(first.prompt) + len(second.prompt), FIRST_TOKENS // PAGE_SIZE * PAGE_SIZE
    assert chats.hits().rate == 32 / asked
    assert chats.hits().one_node == known / asked
    third = chats.turns[-1]
    assert third.known == len(second.prompt)
    assert third.reusable % PAGE_SIZE == 0
    assert 0 <= third.known - third.reusable < PAGE_SIZE
