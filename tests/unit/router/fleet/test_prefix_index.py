"""A router's index of what nodes have cached: gaps, strangers, limits; and what a prompt finds in it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

import router.fleet.registry
from router.api.site.generation import MAX_SESSION_CHARS, session_of
from router.fleet.prefix_index import ComingPages, PageIndex, PromptPages
from router.fleet.registry import RegisteredNode, Registry
from router.http.connection import Connection
from router.policy.interface import Reason, Wanted
from router.policy.prefix_aware import PrefixAware
from shared.core.page_identity import LONG, identities, prefix_keys
from shared.wire.messages import CacheEvents, CacheReplay, Heartbeat
from shared.wire.peers import peer_name
from tests.support.worlds.router_rig import RouterRig, hello, load

PAGE = 16
PROMPT = list(range(100))


def names_of(prompt: Sequence[int], adapter: str = "", lookahead: int = 0, salt: int = 0) -> list[bytes]:
    """Of the pages that a prompt fills."""
    keys = prefix_keys(array("q", prompt).tobytes(), adapter, lookahead, salt)
    return list(identities(keys, PAGE))[: (len(prompt) - lookahead) // PAGE]


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def events(
    seq: int, stored: Sequence[bytes] = (), removed: Sequence[bytes] = (), *, node: str = "a", cleared: bool = False
) -> CacheEvents:
    return CacheEvents(node, 1, seq, cleared, list(removed), list(stored))


def registry_of(*node_ids: str, role: str = "prefill", router_id: str = "") -> tuple[Registry, list[RegisteredNode]]:
    registry = Registry(5.0, follows_caches=True, router_id=router_id)
    nodes = [registry.hello(peer_name(one, 1), hello(role, one), 0.0)[0] for one in node_ids]
    return registry, [node for node in nodes if node is not None]


def test_events_are_taken_in_their_order_once() -> None:
    index = PageIndex()
    assert index.take_events(events(1, [name(1), name(2)], cleared=True)) and index.take_events(
        events(2, [name(3)], [name(1)])
    )
    assert index._names == {name(2), name(3)}
    assert index.take_events(events(1, [name(9)], cleared=True)), "it was taken before"
    assert index._names == {name(2), name(3)} and index.seq == 2


def test_behind_a_gap_nothing_is_taken_and_the_rest_asked_for() -> None:
    registry, [node] = registry_of("a")
    registry.cache_events(node.peer, events(1, [name(1)], cleared=True))
    assert registry.cache_events(node.peer, events(3, [name(3)])) == CacheReplay("a", 1)
    assert registry.cache_events(node.peer, events(4, [name(4)])) is None, "it was asked already"
    assert node.pages._names == {name(1)}
    registry.cache_events(node.peer, events(2, [name(2)]))
    assert registry.cache_events(node.peer, events(4, [name(4)])) == CacheReplay("a", 2), "asked anew behind an answer"


def test_a_message_that_clears_is_taken_after_any_gap() -> None:
    index = PageIndex()
    index.take_events(events(1, [name(1)], cleared=True))
    assert index.take_events(events(7, [name(7)], cleared=True)) and index._names == {name(7)}


@pytest.mark.parametrize(("seq", "after"), [(0, 0), (1, None), (2, None), (5, 2)])
def test_a_heartbeat_tells_of_events_that_were_lost(seq: int, after: int | None) -> None:
    """0: the node has forgotten this router. 1 comes from a heartbeat that is late."""
    registry, [node] = registry_of("a")
    for number in (1, 2):
        registry.cache_events(node.peer, events(number, cleared=number == 1))
    asked = registry.missed_events(node, Heartbeat("a", 1, load(), False, cache_seq=seq))
    assert asked == (None if after is None else CacheReplay("a", after))


def test_a_node_is_believed_about_itself_alone() -> None:
    registry, [a, b] = registry_of("a", "b")
    assert registry.cache_events(b.peer, events(1, [name(1)], cleared=True)) is None
    assert registry.cache_events(a.peer, CacheEvents("a", 2, 1, True, [], [name(1)])) is None, "another life of it"
    assert not len(a.pages) and not len(b.pages)


def test_the_index_is_bounded_and_the_largest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.fleet.registry, "MAX_PAGES", 10)
    registry, [a, b] = registry_of("a", "b")
    registry.cache_events(b.peer, events(1, list(map(name, range(3))), node="b", cleared=True))
    registry.cache_events(a.peer, events(1, list(map(name, range(8))), cleared=True))
    assert (len(a.pages), len(b.pages)) == (0, 3)


def test_a_new_connection_begins_an_empty_index() -> None:
    registry, [node] = registry_of("a")
    registry.cache_events(node.peer, events(1, [name(1)], cleared=True))
    registry.hello(node.peer, hello("prefill", "a"), 1.0)
    assert len(node.pages) == 1, "the same one, said again"
    registry.hello(node.peer, hello("prefill", "a", connection=2), 2.0)
    assert not len(node.pages) and node.pages.seq == 0


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("count", range(7))
def test_the_cached_part_of_a_prompt_is_found(count: int, has_window: bool) -> None:
    index, names = PageIndex(), names_of(PROMPT)
    index.take_events(events(1, [*names[max(0, count - 2) if has_window else 0 : count], name(1)], cleared=True))
    told = msgspec.structs.replace(hello("prefill", "a"), has_window=has_window)
    assert PromptPages(PROMPT, "", 0).cached_tokens(index, told) == PAGE * count


@pytest.mark.parametrize("adapter, lookahead, salt", [("", 0, 0), ("x", 0, 0), ("x", 1, 0), ("", 1, 7)])
def test_adapter_salt_and_drafts_are_in_a_page_s_name(adapter: str, lookahead: int, salt: int) -> None:
    told = msgspec.structs.replace(hello("prefill", "a"), key_lookahead=lookahead)
    index = PageIndex()
    index.take_events(events(1, names_of(PROMPT, adapter, lookahead, salt), cleared=True))
    assert PromptPages(PROMPT, adapter, salt).cached_tokens(index, told) == 6 * PAGE
    assert PromptPages(PROMPT, adapter, salt + 1).cached_tokens(index, told) == 0
    assert PromptPages(PROMPT, "y", salt).cached_tokens(index, told) == 0
    assert PromptPages(PROMPT, adapter, salt).cached_tokens(index, hello("prefill", "a")) == (
        0 if lookahead else 6 * PAGE
    )


@pytest.mark.parametrize(("bound", "adapter"), [(0, ""), (len(PROMPT), ""), (len(PROMPT) - 1, LONG)])
def test_longer_texts_have_other_names(bound: int, adapter: str) -> None:
    """A node tells its bound, and another node may have none."""
    told, index = msgspec.structs.replace(hello("prefill", "a"), short_context=bound), PageIndex()
    index.take_events(events(1, names_of(PROMPT, adapter), cleared=True))
    pages = PromptPages(PROMPT, "", 0)
    assert pages.cached_tokens(index, told) == 6 * PAGE
    assert pages.cached_tokens(index, hello("prefill", "b")) == (0 if adapter else 6 * PAGE)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_prompt_goes_where_it_is_cached(role: str) -> None:
    _, nodes = registry_of("a", "b", "c", role=role)
    nodes[1].ours.dispatched = 99
    nodes[1].pages.take_events(events(1, names_of(PROMPT), cleared=True))
    wanted = Wanted(len(PROMPT), 0.0, PromptPages(PROMPT, "", 0))
    assert PrefixAware().pick(nodes, wanted) == (nodes[1], Reason.PREFIX)
    other = PrefixAware().pick(nodes, Wanted(100, 0.0, PromptPages(PROMPT[::-1], "", 0)))
    assert other.node is not nodes[1] and other.reason is Reason.MEETING
    assert PrefixAware().pick(nodes, Wanted(10, 0.0, PromptPages(PROMPT[:10], "", 0))) == (nodes[0], Reason.TURN)


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    _, nodes = registry_of("a", "b")
    nodes[0].pages.take_events(events(1, names_of(PROMPT), cleared=True))
    wanted = Wanted(len(PROMPT), 0.0, PromptPages(PROMPT, "", 0))
    nodes[0].ours.open_prompt_tokens = nodes[0].ours.open_prompt_work = 50
    assert PrefixAware().pick(nodes, wanted).node is nodes[0]
    nodes[0].ours.open_prompt_tokens = nodes[0].ours.open_prompt_work = 500
    assert PrefixAware().pick(nodes, wanted) == (nodes[1], Reason.LOAD)


def test_a_short_preamble_keeps_nobody() -> None:
    _, nodes = registry_of("a", "b")
    nodes[0].pages.take_events(events(1, names_of(PROMPT)[:2], cleared=True))
    nodes[0].ours.dispatched = 1
    assert PrefixAware().pick(nodes, Wanted(100, 0.0, PromptPages(PROMPT, "", 0))).node is nodes[1]


def test_a_session_breaks_ties_alike_on_every_router() -> None:
    _, nodes = registry_of("a", "b", "c")
    picked = {}
    for number in range(60):
        wanted = Wanted(100, affinity=f"session {number}")
        first, again = PrefixAware().pick(nodes, wanted), PrefixAware().pick(nodes[::-1], wanted)
        assert first == again and first.reason is Reason.AFFINITY
        picked[number] = first.node
        first.node.ours.dispatched += 1
    assert set(picked.values()) == set(nodes)
    for number, node in picked.items():
        if node is not nodes[2]:
            assert PrefixAware().pick(nodes[:2], Wanted(100, affinity=f"session {number}")).node is node


def met(nodes: Sequence[RegisteredNode], prompt: Sequence[int]) -> str:
    """Where a prompt goes that no node has cached."""
    picked = PrefixAware().pick(nodes, Wanted(len(prompt), 0.0, PromptPages(prompt, "", 0)))
    assert picked.reason is Reason.MEETING
    return picked.node.node_id


def test_equal_new_prompts_meet_whichever_router_they_come_to() -> None:
    """Nothing was told of them yet: each router sent them to a node of its own, and both computed them."""
    _, first = registry_of("a", "b", "c", router_id="router-0")
    _, second = registry_of("c", "b", "a", router_id="router-1")
    prompts = [[number, *PROMPT] for number in range(60)]
    places = [met(first, prompt) for prompt in prompts]
    assert places == [met(second, prompt) for prompt in prompts] and set(places) == {"a", "b", "c"}


@pytest.mark.parametrize("rest", [5, 50, 90])
def test_prompts_meet_that_share_half_of_what_they_are(rest: int) -> None:
    _, nodes = registry_of("a", "b", "c", "d")
    for number in range(20):
        shared = [number, *PROMPT]
        assert met(nodes, [*shared, *range(rest)]) == met(nodes, [*shared, *range(7, rest)])


def test_a_short_preamble_brings_nobody_together() -> None:
    _, nodes = registry_of("a", "b", "c", "d")
    assert len({met(nodes, [*PROMPT[:32], number, *PROMPT, *PROMPT]) for number in range(60)}) == 4


def test_one_beginning_fills_no_node() -> None:
    """All prompts of a site may begin alike: beyond a fair share they go to the next node, the same on each router."""
    _, nodes = registry_of("a", "b", "c", "d")
    for _ in range(100):
        name = met(nodes, PROMPT)
        next(node for node in nodes if node.node_id == name).ours.dispatched += 1
    assert max(node.ours.dispatched for node in nodes) <= 1.25 * 25 + 2


LONG = list(range(640))


def burst(rig: RouterRig, count: int) -> list[str]:
    """The prefill nodes of requests that come at once, with all but the last page in common."""
    return [rig.journal.find(generate.key.rid).attempt.prefill.node_id  # type: ignore[union-attr]
            for number in range(count) for generate in rig.open([*LONG, *[number] * PAGE])]  # fmt: skip


def test_a_burst_goes_where_its_prefix_is_computed_while_faster() -> None:
    """One prompt is 656 tokens, each further one 16 more. Beyond 1.25 times 656, a second node is faster."""
    rig = RouterRig(policy="prefix_aware")
    for node_id in ("a", "b", "c"):
        rig.join("prefill", node_id)
    rig.join("decode", "d")
    went = burst(rig, 18)
    first, second = went[0], went[-1]
    assert went[:10] == [first] * 10 and second != first
    assert len(set(went)) == 2, "and the second node is enough"


def test_what_a_node_computes_counts_until_its_prompt_is_done() -> None:
    rig = RouterRig(policy="prefix_aware")
    p, d = rig.join("prefill", "p"), rig.join("decode", "d")
    [generate] = rig.open(LONG)
    wanted = Wanted(len(LONG), 0.0, PromptPages(LONG, "", 0))
    assert wanted.cached(p) == len(LONG) - 1
    assert wanted.cached(d) == 0, "it would compute the prompt itself"
    assert wanted.cached(d, arriving=True) == len(LONG) - 1, "but a hand-off finds it there"
    rig.run(d, generate.key, 0, [5])
    assert wanted.cached(p) == wanted.cached(d, arriving=True) == 0, "from now on the nodes tell"
    rig.end(d, generate.key, 1)
    rig.check_quiet()


def test_two_prompts_with_one_page_both_hold_it() -> None:
    coming = ComingPages()
    coming.update([name(2), name(1)])
    coming.update([name(3), name(1)])
    coming.remove([name(2), name(1)])
    assert name(1) in coming and name(2) not in coming and len(coming) == 2
    coming.remove([name(3), name(1)])
    assert not len(coming)


# ---- sessions


async def nothing(*_: Any) -> Any:
    raise AssertionError("nothing is read or written")


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, ""),
        ({"x-session-id": "s"}, "s"),
        ({"x-correlation-id": "c"}, "c"),
        ({"x-correlation-id": "c", "x-session-id": "s"}, "s"),
        ({"x-session-id": "s" * 1000}, "s" * MAX_SESSION_CHARS),
    ],
)
def test_a_session_is_what_a_header_calls_it(headers: dict[str, str], session: str) -> None:
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert session_of(Connection({"type": "http", "headers": sent}, nothing, nothing, 1.0)) == session
