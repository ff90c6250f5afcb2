"""Returns: how soon conversations come back, by tenant, session and kind of answer, and what nodes hear of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest

from router.requests import returns as rules
from router.requests.answered import Answered, AnswerKind
from router.requests.returns import (
    ASSUMED_S,
    ENOUGH,
    LATEST,
    LONGEST_S,
    PATIENCE_S,
    EndedAnswer,
    Returns,
    page_near_end,
)
from shared.wire.messages import Keep, Key

CALLS, AFTER_TOOLS, PLAIN = AnswerKind
NUMBERS = itertools.count()


@dataclass
class Site:
    """A clock, and one router's measurements."""

    returns: Returns = field(default_factory=Returns)
    now: float = 0.0

    def turn(self, names: list[bytes], answered: Answered | None = None, tenant: int = 0) -> list[float]:
        """Ask and answer; return the seconds that nodes hear."""
        self.returns.came(names, self.now)
        rid = str(next(NUMBERS))
        key = Key("r", 1, rid, 0, 0)
        self.returns.ended(rid, EndedAnswer(key, ("p@1", "d@1"), page_near_end(names), tenant, self.now), names)
        told = self.returns.over(replace(answered or Answered(""), rid=rid))
        assert [(peer, word.key) for peer, word in told] in ([], [("p@1", key), ("d@1", key)])
        return [word.keep_ms / 1000 for _, word in told[:1]]

    def learn(self, gaps: list[float | None], kind: AnswerKind, session: str = "", tenant: int = 0) -> None:
        """Let conversations come back after so many seconds, or not at all, and count them."""
        for gap in gaps:
            names = prompt()
            self.turn(names, Answered("", kind, session), tenant)
            if gap is not None:
                self.now += gap
                self.returns.came([b"more", *names], self.now)
        self.now += PATIENCE_S
        self.returns.came([], self.now)


def prompt(num_pages: int = 5) -> list[bytes]:
    """Return names of pages, last first, that no other prompt has."""
    number = next(NUMBERS)
    return [f"{number}:{page}".encode() for page in reversed(range(num_pages))]


def test_calls_are_kept_for_a_while_before_anything_is_known() -> None:
    site = Site()
    assert site.turn(prompt(), Answered("", CALLS)) == [ASSUMED_S]
    assert site.turn(prompt(), Answered("", AFTER_TOOLS)) == site.turn(prompt()) == []


def test_calls_are_kept_until_all_others_were_back() -> None:
    site = Site()
    site.learn([*[1.0] * 9, 40.0, 9.0, None], CALLS)
    assert site.turn(prompt(), Answered("", CALLS)) == [40.0]
    site.learn([2.0] * LATEST, CALLS)
    assert site.turn(prompt(), Answered("", CALLS)) == [2.0], "only the latest count"


def test_a_tenant_and_a_session_are_judged_by_their_own() -> None:
    site = Site()
    site.learn([2.0] * ENOUGH, CALLS, tenant=1)
    site.learn([4.0] * ENOUGH, CALLS, "slow", tenant=2)
    assert site.turn(prompt(), Answered("", CALLS), tenant=1) == [2.0]
    assert site.turn(prompt(), Answered("", CALLS), tenant=3) == [4.0], "as all together"
    site.learn([8.0] * rules.LATEST, CALLS, "slower", tenant=2)
    assert site.turn(prompt(), Answered("", CALLS, "slow"), tenant=2) == [4.0]
    assert site.turn(prompt(), Answered("", CALLS, "new"), tenant=2) == [8.0]
    assert site.turn(prompt(), Answered("", CALLS, "slow"), tenant=1) == [2.0], "another tenant's session"


def test_kinds_that_never_return_are_evicted_first() -> None:
    site = Site()
    site.learn([None] * 20, AFTER_TOOLS)
    assert site.turn(prompt(), Answered("", AFTER_TOOLS)) == [0.0]
    site.learn([None] * 18 + [5.0] * 4, AFTER_TOOLS)
    assert site.turn(prompt(), Answered("", AFTER_TOOLS)) == []


def test_kinds_of_which_few_return_are_not_kept() -> None:
    site = Site()
    site.learn([None] * 11 + [5.0] * 9, CALLS)
    assert site.turn(prompt(), Answered("", CALLS)) == []


def test_only_answers_with_calls_are_kept_by_what_was_measured() -> None:
    site = Site()
    for kind in AnswerKind:
        site.learn([7.0] * ENOUGH, kind)
    assert [site.turn(prompt(), Answered("", kind)) for kind in AnswerKind] == [[7.0], [], []]


def test_who_is_soon_back_does_not_count_before_the_others() -> None:
    """Else a load that has just begun would look as if all came back soon."""
    site = Site()
    for gap in (1.0, 10.0):
        for _ in range(ENOUGH):
            names = prompt()
            site.turn(names, Answered("", CALLS))
            site.now += gap
            site.returns.came(names, site.now)
    assert site.turn(prompt(), Answered("", CALLS)) == [ASSUMED_S]
    site.now += PATIENCE_S
    site.returns.came([], site.now)
    assert site.turn(prompt(), Answered("", CALLS)) == [10.0]


@pytest.mark.parametrize("num_pages", [1, 2, 9])
def test_a_return_is_known_by_a_page_near_the_prompts_end(num_pages: int) -> None:
    site, names = Site(), prompt(num_pages)
    for _ in range(ENOUGH):
        site.turn(names, Answered("", CALLS))
        site.now += 3.0
        names = [*prompt(3), *(names[1:] or names)]  # the template writes the last page otherwise
    site.now += PATIENCE_S
    site.returns.came([], site.now)
    assert site.turn(prompt(), Answered("", CALLS)) == [3.0]


def test_what_a_client_asks_for_is_kept_as_long() -> None:
    site = Site()
    assert site.turn(prompt(), Answered("", PLAIN, keep_s=300.0)) == [300.0]
    assert site.turn(prompt(), Answered("", CALLS, keep_s=5.0)) == [ASSUMED_S]
    assert site.turn(prompt(), Answered("", PLAIN, keep_s=1e9)) == [LONGEST_S]
    site.learn([None] * 20, AFTER_TOOLS)
    assert site.turn(prompt(), Answered("", AFTER_TOOLS, keep_s=60.0)) == [60.0]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_WAITING", "MOST_GROUPS"):
        monkeypatch.setattr(rules, name, 4)
    site = Site()
    for number in range(20):
        site.turn(prompt(), Answered("", PLAIN, f"session {number}"), tenant=number)
        site.returns.ended(f"unread {number}", EndedAnswer(Key("r", 1, "x", 0, 0), (), b"x", 0, 0.0), ())
        site.returns.left(f"unread {number}")
    parts = site.returns
    assert len(parts._young) == len(parts._waiting) == 4 and not parts._ended
    site.learn([], PLAIN)
    assert len(parts._gaps) == 4 and not parts._young and not parts._waiting


def test_an_answer_that_nobody_read_is_not_kept() -> None:
    assert Returns().over(Answered("unknown", CALLS)) == []


def spent(told: list[tuple[str, Keep]]) -> list[str]:
    return [word.key.rid for peer, word in told if not word.keep_ms and peer == "d@1"]


@dataclass
class Dialogue:
    """A client that names its session, unless it shares its name with others."""

    returns: Returns = field(default_factory=Returns)
    now: float = 0.0

    def turn(
        self, rid: str, names: list[bytes], kind: AnswerKind = PLAIN, *, begun_s: float = 0.0, is_own: bool = True
    ) -> list[str]:
        """Return the earlier answers that nodes shall evict first."""
        self.now += 1.0
        self.returns.came(names, self.now)
        answer = EndedAnswer(
            Key("r", 1, rid, 0, 0), ("p@1", "d@1"), page_near_end(names), 0, self.now, self.now - begun_s
        )
        self.returns.ended(rid, answer, names)
        return spent(self.returns.over(Answered(rid, kind, "s", names_session=is_own)))


def test_of_an_edited_conversation_the_older_branch_goes_first() -> None:
    site, start, first, edited = Dialogue(), prompt(3), prompt(3), prompt(3)
    assert site.turn("a", [*first, *start]) == []
    assert site.turn("b", [*prompt(2), *first, *start]) == [], "it goes on"
    assert site.turn("c", [*edited, *start]) == ["b"]
    assert site.turn("d", [*prompt(2), *edited, *start]) == []


def test_what_tools_ask_is_no_edit() -> None:
    site, main = Dialogue(), prompt(6)
    assert site.turn("main", main, CALLS) == []
    assert site.turn("tool", prompt(4)) == [], "an agent that the first one called"
    assert site.turn("again", [*prompt(1), *main], CALLS) == ["tool"], "it has answered"
    assert site.turn("later", [*prompt(1), *main]) == [], "it goes on"


def test_what_is_asked_at_the_same_time_is_no_edit() -> None:
    site, start = Dialogue(), prompt(6)
    site.turn("a", [*prompt(2), *start])
    assert site.turn("b", [*prompt(2), *start], begun_s=5.0) == []


def test_a_name_that_others_may_have_tells_no_edit() -> None:
    site, start = Dialogue(), prompt(6)
    site.turn("a", [*prompt(2), *start], is_own=False)
    assert site.turn("b", [*prompt(2), *start], is_own=False) == []
