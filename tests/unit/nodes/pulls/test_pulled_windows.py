"""Pulls between prefill nodes of a model with sliding windows: of each page group comes what the next token reads, the
stream is the same, and nothing is left. Page groups: by the windows of the model's two layers."""

from __future__ import annotations

from typing import Any

import pytest

from shared.kv.group_cache import by_group
from shared.model.hashlm.layer import STATE
from shared.wire.messages import Hello, Lent, Ready
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.prefix_pulls import PullPair, job

PAGE, ASKED = 4, 20  # tokens of a page, and pages of tokens that are pulled
# By name: windows of the upper and the lower layer, and how many of the last pages each page group needs
MODELS: dict[str, tuple[int, int | None, list[int]]] = {
    "all windowed": (20, None, [5]),
    "whole below": (20, 0, [ASKED, 5]),
    "whole above": (0, 22, [6, ASKED]),
    "two windows": (9, 30, [8, 2]),
    "state below": (20, STATE, [1, 5]),
}


class WindowedPair(PullPair):
    def __init__(self, name: str, transport: str = "zmq", **knobs: Any) -> None:
        self.window, self.lower_window, self.needed = MODELS[name]
        model = {"window": self.window, "lower_window": self.lower_window}
        super().__init__(CoreKnobs(page_size=PAGE, num_pages=400, **model, **knobs), transport)
        self.warm(self.job(1))

    def job(self, number: int, tokens: int = 100) -> Job:
        return job(number, tokens, window=self.window, lower_window=self.lower_window)

    def pull(self, one: Job) -> None:
        self.finish(self.ask(one, self.source(one, ASKED)), one)

    @property
    def num_sent(self) -> int:
        return sum(len(message.pages) for message in self.said(Ready, self.s) if isinstance(message, Ready))

    @property
    def num_computed(self) -> int:
        self.p.ctx.core.queues.counters.totals()
        return int(self.p.ctx.core.queues.counters.prompt_tokens)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_windowed_group_gets_only_its_last_window(name: str, transport: str) -> None:
    rig = WindowedPair(name, transport)
    rig.pull(rig.job(2))
    assert rig.count("pull.pulled") == 1 and rig.count("pulled_tokens") == ASKED * PAGE
    assert rig.count("pulled_pages") == rig.num_sent == sum(rig.needed)
    assert rig.num_computed == 100 - ASKED * PAGE


@pytest.mark.parametrize(("tokens", "num_full", "num_windowed"), [(41, 10, 5), (73, 2, 2)])
def test_only_missing_pages_of_each_group_travel(tokens: int, num_full: int, num_windowed: int) -> None:
    """Of a window, too, a part may be cached here."""
    rig = WindowedPair("whole below")
    rig.net.run_until_ended([rig.net.generate(rig.p, rig.job(3, tokens))])
    rig.pull(rig.job(2))
    assert rig.count("pulled_pages") == rig.num_sent == num_full + num_windowed
    assert rig.num_computed == tokens + 100 - ASKED * PAGE


@pytest.mark.parametrize("name", ["whole below", "state below"])
def test_lent_pages_are_pinned_in_each_group(name: str) -> None:
    rig = WindowedPair(name)
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    one = rig.job(2)
    key = rig.ask(one, rig.source(one, ASKED))
    rig.net.run()
    cache = rig.s.ctx.core.kv.cache
    rig.s.ctx.core.kv.flush_cache()
    assert [own.num_cached for own in by_group(cache)] == rig.needed
    (loan,) = rig.lender.loans.open.values()
    assert loan.num_pages == sum(rig.needed)
    rig.net.at(2.1)
    rig.net.run()
    assert rig.s.ctx.core.kv.flush_cache() == sum(rig.needed)
    rig.finish(key, one)


def test_a_loan_that_gives_way_leaves_no_window_behind() -> None:
    """The source needs the memory while the pages travel: its windowed pages have another owner then."""
    rig = WindowedPair("whole below", "shm")
    rig.net.hold = lambda source, target, message: isinstance(message, Lent | Ready)
    one = rig.job(2)
    key = rig.ask(one, rig.source(one, ASKED))
    rig.net.run()
    kv = rig.s.ctx.core.kv
    assert rig.s.ctx.core.queues.end_loan()
    windowed = by_group(kv.cache)[1]
    kv.allocator.free(windowed.flush())
    rig.net.let_go()
    rig.finish(key, one)
    assert rig.count("pull.pulled") == 0 and rig.num_computed == 100
    assert windowed.num_cached == 0


def test_a_source_without_a_later_window_lends_an_earlier_one() -> None:
    """All pages of the whole group are there, but of windowed ones only those of a shorter prompt."""
    rig = WindowedPair("whole below")
    kv = rig.s.ctx.core.kv
    kv.allocator.free(by_group(kv.cache)[1].flush())
    rig.warm(rig.job(3, tokens=41))
    assert by_group(kv.cache)[0].num_cached > ASKED
    rig.pull(rig.job(2))
    (lent,) = [message for message in rig.said(Lent, rig.s) if isinstance(message, Lent)]
    assert lent.num_pages == 10 and rig.count("pulled_pages") == 10 + 5
    assert rig.num_computed == 100 - 40


@pytest.mark.parametrize(("tokens", "num_followers"), [(60, 0), (83, 1)])
def test_only_a_prompt_with_the_whole_prefix_waits(tokens: int, num_followers: int) -> None:
    """A pull brings the last window alone: what leaves the prompt before could not begin with these pages."""
    rig = WindowedPair("whole below")
    rig.net.hold = lambda source, target, message: isinstance(message, Ready)
    one, other = rig.job(2), rig.job(3, tokens)
    keys = [rig.ask(one, rig.source(one, ASKED)), rig.net.generate(rig.p, other)]
    rig.net.run()
    assert [key in rig.net.router.ends for key in keys] == [False, not num_followers]
    rig.net.let_go()
    rig.finish(keys[0], one)
    rig.finish(keys[1], other)
    assert rig.num_computed == 20 + tokens - num_followers * ASKED * PAGE


def test_a_prompt_waits_for_a_part_that_is_all_there() -> None:
    """Windows that begin before the pulled pages are cached here: prompts may begin behind each page."""
    rig = WindowedPair("whole below")
    rig.net.run_until_ended([rig.net.generate(rig.p, rig.job(4, 65))])
    rig.net.hold = lambda source, target, message: isinstance(message, Ready)
    one, other = rig.job(2), rig.job(3, 77)
    keys = [rig.ask(one, rig.source(one, ASKED)), rig.net.generate(rig.p, other)]
    rig.net.run()
    assert not any(rig.net.router.ends[key] for key in keys)
    rig.net.let_go()
    rig.finish(keys[0], one)
    rig.finish(keys[1], other)
    assert rig.num_computed == 65 + 20 + 77 - 76


@pytest.mark.parametrize("name", MODELS)
def test_a_node_says_whether_its_told_pages_have_a_window(name: str) -> None:
    """Routers hear of the first group's pages alone, and search those of a whole group in few steps."""
    rig = WindowedPair(name)
    (told,) = [message for message in rig.said(Hello, rig.s) if isinstance(message, Hello)]
    assert told.has_window is (by_group(rig.s.ctx.core.kv.cache)[0].windows != (0,)) is (name != "whole below")
