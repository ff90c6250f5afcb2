"""The simulation's ledger of causes: what explains a resume or a failure, and what does not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shared.wire.messages import Abort, Hello, Key, Tokens
from tests.support.sim.ledger import Ledger
from tests.support.sim.oracles import Violation
from tests.support.sim.waiting import WAITING
from tests.support.wire.wire_samples import GENERATE, MESSAGES

HELLO = next(message for message in MESSAGES if isinstance(message, Hello))
END = next(message for message in MESSAGES if isinstance(message, Tokens)).ends[0]
SILENCE_S, LEASE_S = 3.0, 6.0
ROUTER, PREFILL, DECODE = "r0", "prefill-0", "decode-0"


class Book:
    """A ledger and one request of it, which began at 10 s."""

    def __init__(self, *, limited: frozenset[str] = frozenset(), is_quiet: bool = False) -> None:
        self.ledger = Ledger(SILENCE_S, LEASE_S, limited, is_quiet)
        self.generate(0, 10.0)

    def generate(self, attempt: int, now: float, decode: str = DECODE) -> None:
        message = replace(GENERATE, key=key(attempt), decode_node=decode)
        self.ledger.sent(ROUTER, PREFILL, message, now, was_taken=True)

    def told(self, code: str, text: str, now: float) -> None:
        end = replace(END, key=key(0), reason="error", error_code=code, error_message=text)
        self.ledger.sent(PREFILL, ROUTER, Tokens(PREFILL, 1, [], [end]), now, was_taken=True)

    def broke(self, kind: str, *hosts: str, at: float = 11.0, lasts: float = 1.0) -> None:
        self.ledger.note(kind, frozenset(hosts), at, at + lasts)


def key(attempt: int) -> Key:
    return Key(ROUTER, 1, "1", attempt, 0)


def test_a_resume_without_a_fault_has_no_cause() -> None:
    book = Book()
    with pytest.raises(Violation, match="nothing of it broke"):
        book.generate(1, 12.0)


@pytest.mark.parametrize("hosts", [(PREFILL,), (DECODE,), (ROUTER,), (PREFILL, DECODE), (ROUTER, DECODE)])
def test_a_fault_of_its_hosts_or_between_them_explains_it(hosts: tuple[str, ...]) -> None:
    book = Book()
    book.broke("partition", *hosts)
    book.generate(1, 12.0)
    assert book.ledger.counts["resumed: partition"] == 1


@pytest.mark.parametrize("hosts", [("prefill-1",), (PREFILL, "decode-1"), ("r1", DECODE)])
def test_what_befell_others_does_not(hosts: tuple[str, ...]) -> None:
    book = Book()
    book.broke("partition", *hosts)
    with pytest.raises(Violation):
        book.generate(1, 12.0)


@pytest.mark.parametrize(("at", "explains"), [(1.0, False), (2.9, False), (5.0, True), (12.5, False)])
def test_a_fault_explains_what_it_met_and_what_came_soon_after(at: float, explains: bool) -> None:
    """The connections of a fault's time may be gone when a request begins; later ones it does not touch."""
    book = Book()
    book.broke("reset", PREFILL, DECODE, at=at)
    if explains:
        book.generate(1, 12.0)
        return
    with pytest.raises(Violation):
        book.generate(1, 12.0)


@pytest.mark.parametrize(
    ("code", "text", "kind", "explains"),
    [
        ("handoff_failed", "page 3: its digest differs from the one announced", "partition", False),
        ("handoff_failed", "page 3: its digest differs from the one announced", "corrupt", True),
        ("handoff_failed", "decode-0@1 did not install it in 6 s", "partition", True),
        ("step_failed", "step 3", "partition", False),
        ("step_failed", "step 3", "failed step", True),
        ("wire_error", "Generate: a field is missing", "partition", False),
        ("wire_error", "Generate: a field is missing", "unreadable", True),
        ("node_draining", "takes nothing new", "crash", False),
        ("node_draining", "takes nothing new", "admin drain", True),
    ],
)
def test_a_fault_must_be_able_to_bring_about_what_was_told(code: str, text: str, kind: str, explains: bool) -> None:
    book = Book()
    book.broke(kind, PREFILL)
    book.told(code, text, 11.5)
    if explains:
        book.generate(1, 12.0)
        return
    with pytest.raises(Violation, match=code):
        book.generate(1, 12.0)


def test_a_full_queue_s_limit_is_a_cause_where_there_is_one() -> None:
    for limited in (frozenset((DECODE,)), frozenset((PREFILL,))):
        book = Book(limited=limited)
        book.told("partner_overloaded", "full", 11.0)
        book.generate(1, 11.1)
    book = Book()
    book.told("partner_overloaded", "full", 11.0)
    with pytest.raises(Violation):
        book.generate(1, 11.1)


def test_where_nothing_may_break_drains_and_losses_explain() -> None:
    for kind in ("slow path", "full queue", "partition"):
        book = Book(is_quiet=True)
        book.broke(kind, PREFILL)
        with pytest.raises(Violation):
            book.generate(1, 12.0)
    for kind, hosts in (("role change", (DECODE,)), ("vanished", (ROUTER, PREFILL))):
        book = Book(is_quiet=True)
        book.broke(kind, *hosts)
        book.generate(1, 12.0)
        assert book.ledger.counts["resumes"] == 1


def test_a_move_goes_from_a_full_node_to_one_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(WAITING, "E3", raising=False)
    for old, new in ((False, True), (True, True), (False, False)):
        book = Book()
        book.ledger.saw(DECODE, 1, has_room=old, now=10.5)
        book.ledger.saw("decode-1", 1, has_room=new, now=10.6)
        if (old, new) == (False, True):
            book.generate(1, 12.0, "decode-1")
            assert book.ledger.counts["resumed: moved"] == 1
            continue
        with pytest.raises(Violation):
            book.generate(1, 12.0, "decode-1")


def test_an_attempt_ends_when_withdrawn_not_when_the_next_begins() -> None:
    book = Book()
    book.ledger.sent(ROUTER, PREFILL, Abort(key(0), True), 11.0, was_taken=True)
    book.broke("crash", DECODE, at=15.0)
    with pytest.raises(Violation, match="at 11.00 s"):
        book.generate(1, 16.0)


def test_what_lasts_until_a_restart_is_over_with_it() -> None:
    book = Book(is_quiet=True)
    book.ledger.saw(DECODE, 1, has_room=True, now=1.0)
    book.ledger.note("admin drain", frozenset((DECODE,)), 2.0, float("inf"), 1)
    book.ledger.saw(DECODE, 2, has_room=True, now=3.0)
    with pytest.raises(Violation):
        book.generate(1, 12.0)


def test_a_failure_needs_a_cause_too() -> None:
    book = Book()
    with pytest.raises(Violation, match="nothing of it broke"):
        book.ledger.ended([(ROUTER, 1, "1")], "node_lost", 12.0)
    with pytest.raises(Violation, match="nothing broke"):
        Book().ledger.ended([], "no_nodes", 12.0)
    book = Book()
    book.broke("crash", DECODE)
    book.ledger.ended([(ROUTER, 1, "1")], "node_lost", 12.0)
    assert book.ledger.counts["failed: crash"] == 1


def test_a_hello_that_is_said_again_needs_a_cause() -> None:
    for broke in (False, True):
        book = Book()
        book.ledger.sent(PREFILL, ROUTER, HELLO, 10.0, was_taken=True)
        if broke:
            book.broke("drop", PREFILL, ROUTER)
            book.ledger.sent(PREFILL, ROUTER, HELLO, 12.0, was_taken=True)
            continue
        with pytest.raises(Violation, match="say Hello"):
            book.ledger.sent(PREFILL, ROUTER, HELLO, 12.0, was_taken=True)


def test_a_pair_known_not_to_connect_is_tried_only_a_few_times() -> None:
    for count, is_fine in ((10, True), (11, False)):
        book = Book(is_quiet=True)
        book.broke("one way", PREFILL, DECODE, at=0.0, lasts=90.0)
        for number in range(count):
            book.generate(number + 1, 11.0 + number)
        if is_fine:
            book.ledger.check_pairs()
            continue
        with pytest.raises(Violation, match="known not to connect"):
            book.ledger.check_pairs()
