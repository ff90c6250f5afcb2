"""What routers tell each other of their tenants: what is charged, what is ignored, and what has bounds."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from router.queue import spending
from router.queue.rate_limit import REQUESTS, TOKENS
from router.queue.spending import DIFFERS_S, MAX_ROUTERS, MAX_ROWS, PERIOD_S, REPEAT_S, LimitDifference, Reading
from router.tenants.keys_file import parse_keys
from shared.core.errors import RateLimited
from shared.wire.codec import decode, encode
from shared.wire.messages import Spending
from tests.support.worlds.spending_world import SECRET, TenantBooks, keys_text

TEXT = keys_text(["a"], requests=10, tokens=1000)


def books(name: str, epoch: int = 1, text: str = TEXT, now: float = 0.0) -> TenantBooks:
    return TenantBooks(name, epoch, text, now)


def charge(own: TenantBooks, num_tokens: int, now: float, name: str = "a") -> Callable[[int, float], None]:
    return own.limits.of(own.tenant(name)).charge(num_tokens, now).settle


def told(own: TenantBooks, now: float) -> Spending:
    message = own.ledger.write(now)
    assert message is not None
    copy = decode(encode(message))
    assert isinstance(copy, Spending)
    return copy


def test_what_one_router_charges_counts_at_the_others() -> None:
    mine, theirs = books("mine"), books("theirs")
    charge(mine, 400, 0.0)
    assert theirs.ledger.read(told(mine, 0.0), 0.0) is Reading.DONE
    assert (theirs.left("a", TOKENS, 0.0), theirs.left("a", REQUESTS, 0.0)) == (600, 9)
    charge(mine, 300, 1.0)
    assert theirs.ledger.read(told(mine, 1.0), 1.0) is Reading.DONE
    assert theirs.left("a", REQUESTS, 1.0) == 8
    with pytest.raises(RateLimited):
        charge(theirs, 400, 1.0)
    assert mine.left("a", TOKENS, 1.0) == 316, "what is read is not told again"
    assert mine.ledger.read(told(theirs, 1.0), 1.0) is Reading.DONE and mine.left("a", TOKENS, 1.0) == 316


def test_limits_that_differ_for_long_are_named() -> None:
    mine, theirs = books("mine"), books("theirs", text=keys_text(["a"], requests=10, tokens=50))
    charge(mine, 10, 0.0)
    theirs.ledger.read(told(mine, 0.0), 0.0)
    assert not theirs.ledger.differences, "perhaps a new keys file is on its way"
    theirs.ledger.read(told(mine, DIFFERS_S), DIFFERS_S)
    assert theirs.ledger.differences == [LimitDifference("a", (10, 50), (10, 1000))]
    theirs.tenants.replace(mine.tenants.now)
    theirs.ledger.read(told(mine, 2 * DIFFERS_S), 2 * DIFFERS_S)
    assert not theirs.ledger.differences
    theirs.tenants.replace(parse_keys(keys_text(["a"], requests=10, tokens=50)))
    theirs.ledger.read(told(mine, 3 * DIFFERS_S), 3 * DIFFERS_S)
    assert not theirs.ledger.differences, "it differs anew"


def test_one_that_comes_by_three_nodes_counts_once() -> None:
    mine, theirs = books("mine"), books("theirs")
    charge(mine, 400, 0.0)
    message = told(mine, 0.0)
    for _ in range(3):
        assert theirs.ledger.read(message, 0.0) is Reading.DONE
    assert theirs.left("a", TOKENS, 0.0) == 600


def test_an_older_one_changes_nothing() -> None:
    mine, theirs = books("mine"), books("theirs")
    charge(mine, 100, 0.0)
    first = told(mine, 0.0)
    charge(mine, 300, 0.0)
    for message in (told(mine, 1.0), first):
        theirs.ledger.read(message, 1.0)
    assert theirs.left("a", TOKENS, 1.0) == 600


def test_what_is_given_back_comes_back_at_the_others() -> None:
    mine, theirs = books("mine"), books("theirs")
    settle = charge(mine, 900, 0.0)
    theirs.ledger.read(told(mine, 0.0), 0.0)
    settle(100, 0.0)
    theirs.ledger.read(told(mine, 0.5), 0.5)
    assert theirs.left("a", TOKENS, 0.5) == 908


def test_counts_are_looked_at_once_in_a_period() -> None:
    own = books("mine")
    charge(own, 100, 0.0)
    told(own, 0.0)
    assert own.ledger.write(PERIOD_S) is None, "nothing has changed"
    charge(own, 100, PERIOD_S)
    assert own.ledger.write(1.9 * PERIOD_S) is None
    told(own, 2 * PERIOD_S)


def test_a_canceled_request_costs_nothing_anywhere() -> None:
    mine, theirs = books("mine"), books("theirs")
    taken = mine.limits.of(mine.tenant("a")).charge(900, 0.0)
    theirs.ledger.read(told(mine, 0.0), 0.0)
    taken.cancel(0.0)
    theirs.ledger.read(told(mine, 0.5), 0.5)
    assert (theirs.left("a", TOKENS, 0.5), theirs.left("a", REQUESTS, 0.5)) == (1000, 10)


def test_what_was_charged_before_we_began_costs_nothing() -> None:
    mine = books("mine")
    settle = charge(mine, 900, 3599.0)
    told(mine, 3599.0)
    theirs = books("theirs", now=3600.0)
    charge(mine, 100, 3600.0)
    theirs.ledger.read(told(mine, 3601.0), 3601.0)
    assert theirs.left("a", TOKENS, 3601.0) == 1000
    charge(theirs, 500, 3601.0)
    settle(0, 3601.0)
    theirs.ledger.read(told(mine, 3602.0), 3602.0)
    assert theirs.left("a", TOKENS, 3602.0) < 520, "what it did not charge it does not give back"
    charge(mine, 100, 3602.0)
    theirs.ledger.read(told(mine, 3603.0), 3603.0)
    assert theirs.left("a", TOKENS, 3603.0) < 440


def test_a_tenant_that_came_after_us_is_charged_from_its_first() -> None:
    text = keys_text("ab", tokens=1000)
    mine = books("mine", text=text)
    charge(mine, 900, 0.0)
    told(mine, 0.0)
    theirs = books("theirs", text=text, now=3600.0)
    charge(mine, 300, 3601.0, "b")
    theirs.ledger.read(told(mine, 3601.0), 3601.0)
    assert (theirs.left("a", TOKENS, 3601.0), theirs.left("b", TOKENS, 3601.0)) == (1000, 700)


def test_a_restarted_router_counts_from_zero() -> None:
    mine, theirs, again = books("mine"), books("theirs"), books("mine", 2, now=10.0)
    charge(mine, 900, 0.0)
    theirs.ledger.read(told(mine, 0.0), 0.0)
    charge(mine, 1, 60.0)
    late = told(mine, 60.0)
    charge(again, 300, 60.0)
    theirs.ledger.read(told(again, 60.0), 60.0)
    assert theirs.left("a", TOKENS, 60.0) == 700, "less than its former life had charged"
    theirs.ledger.read(late, 60.0)
    assert theirs.left("a", TOKENS, 60.0) == 700, "that life is over"


def test_our_own_counts_come_back_without_effect() -> None:
    mine = books("mine")
    charge(mine, 400, 0.0)
    assert mine.ledger.read(told(mine, 0.0), 0.0) is Reading.DONE and mine.left("a", TOKENS, 0.0) == 600
    again = books("mine", 2)
    assert again.ledger.read(told(mine, REPEAT_S), 9.0) is Reading.DONE and again.left("a", TOKENS, 9.0) == 1000


# ---- who may say it


def test_what_is_not_signed_charges_nothing() -> None:
    mine, theirs = books("mine"), books("theirs")
    charge(mine, 400, 0.0)
    right = told(mine, 0.0)
    change = msgspec.structs.replace
    body = right.body
    other = books("mine", text=keys_text(["a"], tokens=1000, secret="another"))
    charge(other, 400, 0.0)
    for forged in (
        change(right, router_id="nobody"),
        change(right, router_epoch=2),
        change(right, number=2),
        change(right, body=body[:-1] + bytes([body[-1] ^ 1])),
        change(right, body=bytes([body[0] ^ 1]) + body[1:]),
        change(right, body=b""),
        told(other, 0.0),
    ):
        assert theirs.ledger.read(forged, 0.0) is Reading.UNSIGNED
    assert theirs.left("a", TOKENS, 0.0) == 1000
    assert theirs.ledger.read(right, 0.0) is Reading.DONE
    assert theirs.left("a", TOKENS, 0.0) == 600, "it heard nothing of that router"


def test_a_node_that_repeats_or_withholds_gains_nothing() -> None:
    """What it repeats counts once, what it withholds is in the next one: counts are cumulative."""
    mine, theirs, kept = books("mine"), books("theirs"), []
    for second in range(10):
        charge(mine, 50, second)
        kept.append(told(mine, second))
    for message in (*kept[2:4], *kept, kept[9], *kept[::-1]):
        assert theirs.ledger.read(message, 9.0) is Reading.DONE
    assert theirs.left("a", TOKENS, 9.0) == 500


def test_a_forgotten_router_is_not_read_again() -> None:
    """Else a node could repeat it, and have it charged again, when enough others have come."""
    theirs = books("theirs", text=keys_text(["a"], tokens=100_000))
    kept = []
    for number in range(MAX_ROUTERS + 1):
        one = books(f"r{number}", epoch=10 + number, text=keys_text(["a"], tokens=100_000))
        charge(one, 100, float(number))
        kept.append(told(one, float(number)))
        theirs.ledger.read(kept[-1], 0.0)
    left = theirs.left("a", TOKENS, 0.0)
    assert left == 100_000 - 100 * len(kept) and len(theirs.ledger._lives) == MAX_ROUTERS
    for message in kept:
        assert theirs.ledger.read(message, 1e-3) is Reading.DONE
    assert theirs.left("a", TOKENS, 0.0) == left


def test_a_body_that_is_none_is_passed_over() -> None:
    mine, theirs = books("mine"), books("theirs")
    seal = spending.Seal(SECRET)
    for payload in (b"", b"\xc1", msgspec.msgpack.encode([1, [["a", 0, -1, 0, 0]]]), msgspec.msgpack.encode([1, 2, 3])):
        reading = theirs.ledger.read(Spending("mine", 1, 1, seal.close("mine", 1, 1, payload)), 0.0)
        assert reading is Reading.OTHER_VERSION
    charge(mine, 400, 0.0)
    theirs.ledger.read(told(mine, 0.0), 0.0)
    assert theirs.left("a", TOKENS, 0.0) == 600


# ---- when, and how much


@pytest.mark.parametrize(
    ("text", "tells"),
    [
        (keys_text(["a"], tokens=1000), True),
        (keys_text(["a"], requests=10), True),
        (keys_text("ab"), True),
        (keys_text(["a"]), True),  # it may get a limit: others must not take all before for new
        (keys_text("ab", tokens=1000, secret=""), False),
    ],
    ids=["tokens", "requests", "two share", "one without limits", "no secret"],
)
def test_who_has_something_to_tell(text: str, tells: bool) -> None:
    own = books("mine", text=text)
    charge(own, 100, 0.0)
    assert (own.ledger.write(0.0) is not None) == tells
    expected = Reading.UNSIGNED if own.tenants.now.stream_secret else Reading.DONE
    assert own.ledger.read(Spending("r", 1, 1, b"made up"), 0.0) is expected


def test_it_speaks_when_counts_change_and_now_and_then() -> None:
    own = books("mine")
    assert own.ledger.write(0.0) is None
    charge(own, 10, 0.0)
    assert told(own, PERIOD_S).number == 1
    charge(own, 10, PERIOD_S + 0.1)
    assert own.ledger.write(2 * PERIOD_S - 0.01) is None
    assert told(own, 2 * PERIOD_S).number == 2
    assert own.ledger.write(PERIOD_S + REPEAT_S - 0.01) is None
    assert told(own, 2 * PERIOD_S + REPEAT_S).number == 3, "the last one may be lost"


def test_a_debt_for_others_has_a_bound() -> None:
    """After an hour cut off from a router that admitted a limit of its own, a tenant waited for an hour."""
    mine, theirs = books("mine"), books("theirs")
    charge(mine, 1, 0.0)
    theirs.ledger.read(told(mine, 0.0), 0.0)
    for minute in range(60):
        charge(mine, 999, 60.0 * minute + 60.0)
    charge(theirs, 1000, 3600.0)
    theirs.ledger.read(told(mine, 3600.0), 3600.0)
    assert theirs.limits.of(theirs.tenant("a")).meters[TOKENS].reset_s(3600.0) == pytest.approx(240.0, abs=0.1)


def test_the_most_tenants_fit_and_all_have_their_turn() -> None:
    names = [f"{number:064d}" for number in range(2 * MAX_ROWS + 100)]
    mine, theirs = (books(name, text=keys_text(names, tokens=1 << 40)) for name in ("mine", "theirs"))
    for name in names:
        mine.queue.started[name] += 1 << 40
        charge(mine, 1 << 40, 0.0, name)
    for now in (0.0, 1.0, 2.0):
        message = told(mine, now)
        assert len(message.body) < 1 << 16
        theirs.ledger.read(message, now)
    assert all(theirs.left(name, TOKENS, 2.0) < 1 << 38 for name in names)
    charge(mine, 1, 60.0, names[5])
    assert told(mine, 60.0).body.count(names[5].encode()) == 1, "what has changed comes first"


def test_tenants_leave_and_come_back_and_keep_their_counts() -> None:
    mine, theirs = books("mine"), books("theirs")
    charge(mine, 900, 0.0)
    theirs.ledger.read(told(mine, 0.0), 0.0)
    for own in (mine, theirs):
        own.tenants.replace(parse_keys(keys_text("b", tokens=1000)))
        own.limits.keep("b")
    assert mine.ledger.write(1.0) is None
    for own in (mine, theirs):
        own.tenants.replace(parse_keys(TEXT))
    charge(theirs, 1000, 2.0)
    charge(mine, 100, 2.0)
    theirs.ledger.read(told(mine, 2.0), 2.0)
    wait_s = theirs.limits.of(theirs.tenant("a")).meters[TOKENS].reset_s(2.0)
    assert wait_s == pytest.approx(66.0), "a count that began anew would look like 800 tokens given back"


def test_a_tenant_of_another_file_is_passed_over() -> None:
    mine, theirs = books("mine", text=keys_text("ab", tokens=1000)), books("theirs")
    charge(mine, 100, 0.0, "b")
    charge(mine, 100, 0.0)
    theirs.ledger.read(told(mine, 0.0), 0.0)
    assert theirs.left("a", TOKENS, 0.0) == 900 and "b" not in theirs.limits.spent
