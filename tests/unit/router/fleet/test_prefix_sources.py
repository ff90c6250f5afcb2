"""When a router names another prefill node as the source of a prompt's pages, and what it says of it."""

from __future__ import annotations

import msgspec
import pytest

from router.dispatch.dispatcher import DispatchLimits
from router.fleet.figures import FRESH_S
from router.fleet.leaving import By, Leaving
from router.fleet.registry import RegisteredNode
from router.policy.sources import PrefixSources
from router.requests.effects import Effects
from router.requests.tickets import Tickets
from shared.core.sampling_params import SamplingParams
from shared.wire.codec import key_of
from shared.wire.messages import CacheEvents, Generate, Heartbeat, PrefixSource
from shared.wire.tickets import is_genuine
from tests.support.worlds.router_rig import FINGERPRINT, RouterRig, load
from tests.unit.router.fleet.test_prefix_index import PROMPT, names_of
from tests.unit.router.fleet.test_router_prompt_cost import learnt

TOKEN_S = 0.001


class Site(RouterRig):
    """Prefill nodes a and b. All prompts are sent to a, which has nothing; b has pages of the prompt."""

    def __init__(self, num_cached: int = 5, token_s: float | None = TOKEN_S) -> None:
        super().__init__(policy="prefix_aware")
        self.a, self.b = self.join("prefill", "a"), self.join("prefill", "b")
        self.stores(self.b, num_cached)
        self.tickets = Tickets()
        self.sources = PrefixSources(self.registry, self.tickets, token_s)
        self.effects = Effects(0.0)

    def stores(self, node: RegisteredNode, num_pages: int) -> None:
        events = CacheEvents(node.node_id, 1, node.pages.seq + 1, True, [], names_of(PROMPT)[:num_pages])
        self.registry.cache_events(node.peer, events)

    def become(self, node: RegisteredNode, **fields: int) -> None:
        """Say Hello again, with another fingerprint."""
        other = msgspec.structs.replace(FINGERPRINT, **fields)
        self.registry.hello(node.peer, msgspec.structs.replace(node.hello, fingerprint=other), self.now)

    def choose(self, sampling: SamplingParams | None = None) -> PrefixSource | None:
        generate = self.open(PROMPT, sampling=sampling)[0]
        request = next(iter(self.journal.all()))
        request.attempt.prefill = self.a
        self.effects = Effects(self.now)
        source = self.sources.choose(request, key_of(generate.key), self.effects)
        self.dispatcher.cancel([request.rid], self.now)
        self.generate = generate
        return source

    def pulled(self, tokens: float, seconds: float) -> None:
        told = msgspec.structs.replace(load(), counters={"pulled_tokens": tokens, "pull_seconds": seconds})
        self.registry.heartbeat(Heartbeat("a", 1, told, False), self.now)


def test_the_node_with_more_of_a_prompt_is_named() -> None:
    site = Site()
    source = site.choose()
    assert source is not None and site.effects.sought == ["named"]
    assert (source.node, source.epoch, source.num_pages, source.within_ms) == ("b", 1, 5, 80)
    assert source.last_page == names_of(PROMPT)[4]


def test_its_ticket_is_for_these_two_nodes_and_these_pages() -> None:
    site = Site()
    source = site.choose()
    assert source is not None
    key, request = site.tickets.key_of(site.b.peer), key_of(site.generate.key)
    assert is_genuine(key, request, site.a.peer, source.ticket, source.last_page)
    assert not is_genuine(key, request, site.a.peer, source.ticket), "a hand-off"
    assert not is_genuine(key, request, site.b.peer, source.ticket, source.last_page)
    assert not is_genuine(site.tickets.key_of(site.a.peer), request, site.a.peer, source.ticket, source.last_page)


def test_a_few_pages_are_not_worth_the_messages() -> None:
    site = Site(3)
    assert site.choose() is None and not site.effects.sought
    site.stores(site.b, 5)
    site.stores(site.a, 2)
    assert site.choose() is None
    site.stores(site.a, 1)
    assert site.choose() is not None


def test_nothing_is_named_before_computing_was_measured() -> None:
    site = Site(token_s=None)
    assert site.choose() is None and site.effects.sought == ["unmeasured"]


def test_where_pulls_were_slower_lately_the_node_computes() -> None:
    site = Site()
    site.pulled(100, 0.2)
    assert site.choose() is None and site.effects.sought == ["slower"]
    site.now = FRESH_S + 1
    assert site.choose() is not None


def test_a_rate_of_short_prompts_makes_no_pull_worth_it() -> None:
    """Node a has a rate, from prompts of 112 tokens: with it, 80 tokens would take 10 ms. The line of node b shows that
    they take 0.8 ms more, beside what the step costs anyway."""
    site = Site()
    site.a.figures.prompts, site.b.figures.prompts = learnt(0.014, 1e-5, lengths=(112,)), learnt(0.014, 1e-5)
    site.now = 20.0
    assert site.choose() is None and site.effects.sought == ["quickly_computed"]


def test_a_third_node_s_line_stands_in_for_the_source_s() -> None:
    site = Site()
    c = site.join("prefill", "c")
    site.stores(c, 1)
    site.a.figures.prompts, c.figures.prompts = learnt(0.014, 1e-5, lengths=(112,)), learnt(0.014, 1e-5)
    site.now = 20.0
    assert site.choose() is None and site.effects.sought == ["quickly_computed"]
    c.figures.prompts = learnt(0.014, 1e-5, lengths=(112,))
    assert site.choose() is not None, "there are only rates"


def test_pulls_in_vain_count_as_slow() -> None:
    site = Site()
    site.pulled(100, 0.01)
    assert site.choose() is not None
    site.pulled(100, 1.0)
    assert site.choose() is None and site.effects.sought == ["slower"]


def test_other_pages_and_nodes_that_are_away_are_not_named() -> None:
    site = Site()
    site.b.leaving = Leaving(By.NODE)
    assert site.choose() is None
    site.b.leaving = None
    site.become(site.b, numerics=9)
    assert site.choose() is None


@pytest.mark.parametrize(("asker", "source", "is_named"), [(14, 15, True), (15, 14, False), (15, 16, True)])
def test_a_neighbouring_version_is_named_if_it_lends(asker: int, source: int, *, is_named: bool) -> None:
    """Version 14 refuses all but its own."""
    site = Site()
    site.become(site.a, protocol=asker)
    site.become(site.b, protocol=source)
    assert (site.choose() is not None) is is_named
    site.become(site.b, protocol=source, numerics=9)
    assert site.choose() is None


def test_an_address_of_another_machine_s_own_is_not_named() -> None:
    site = Site()
    for endpoint, is_named in (
        ("tcp://127.0.0.1:9000", False),
        ("tcp://127.0.0.1:9000#ab", False),
        ("tcp://[::1]:9000", False),
        ("ipc:///tmp/b", False),
        ("tcp://10.0.0.2:9000#ab", True),
        ("tcp://b:9000", True),
    ):
        site.b.hello = msgspec.structs.replace(site.b.hello, node_endpoint=endpoint, host_id="another")
        assert (site.choose() is not None) is is_named, endpoint
    site.b.hello = msgspec.structs.replace(site.b.hello, node_endpoint="tcp://127.0.0.1:9000", host_id="host")
    assert site.choose() is not None


def test_a_scored_prompt_is_computed() -> None:
    assert Site().choose(SamplingParams(max_tokens=5, prompt_logprobs=0)) is None


def test_a_windowed_source_has_what_its_last_page_says() -> None:
    """Its cache dropped the pages before the window. A page behind the last one that may travel says nothing."""
    site = Site()
    for node in (site.a, site.b):
        node.hello = msgspec.structs.replace(node.hello, has_window=True)
    for page, num_pages in ((4, 5), (3, 4)):
        site.b.pages._names.clear()
        site.b.pages._names.update(names_of(PROMPT)[page : page + 1])
        source = site.choose()
        assert source is not None and source.num_pages == num_pages
        assert source.last_page == names_of(PROMPT)[page]
    site.b.pages._names.clear()
    assert site.choose() is None


def test_a_router_that_is_told_so_names_nobody() -> None:
    """And the attempts ask only if pulls are on."""
    generates: list[Generate] = []
    for is_on in (True, False):
        site = Site()
        limits = DispatchLimits(9, 1, 60.0, pulls_prefixes=is_on, assumed_token_s=TOKEN_S)
        site.dispatcher = type(site.dispatcher)(("r", 9), site.registry, site.dispatcher._placer, site.journal, limits)
        site.join("decode", "d")
        site.b.ours.open_prompt_tokens = site.b.ours.open_prompt_work = 10_000
        generates += site.open(PROMPT)
    assert [generate.source is not None for generate in generates] == [True, False]
