"""Three routers and one limit, over a network that delays, loses, reorders and triples what they tell each other.

Ten minutes of clients that always ask for more than the limit. One router alone admits eleven minutes' worth: a
tenant that comes from a pause may take a minute's at once.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.support.worlds.spending_world import Network, World, keys_text

SECONDS = 600.0
LIMIT = 6000  # tokens a minute
MOST = 300  # of one request
EQUAL, UNEVEN, AT_ONE, FLOOD = (3.0, 3.0, 3.0), (1.0, 2.0, 7.0), (10.0, 0.0, 0.0), (8.0, 8.0, 8.0)  # requests/s
SEEDS = (1, 2)


@cache
def used(rates: tuple[float, ...], seed: int, network: Network, *, requests: int = 0) -> Counter[str]:
    """Tokens that routers admitted, by router; with a limit of `requests` instead, these."""
    text = keys_text(["a"], requests=requests, tokens=0 if requests else LIMIT)
    world = World(len(rates), text, seed, network)
    for router, rate in zip(world.routers, rates, strict=True):
        if rate:
            world.clients(router, "a", rate, MOST)
    world.run(SECONDS)
    return world.admitted if requests else world.used


def beside_one(rates: tuple[float, ...], seed: int, network: Network) -> float:
    """What three routers admit, in parts of what one alone does."""
    return used(rates, seed, network).total() / used((10.0,), seed, Network()).total()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rates", [EQUAL, UNEVEN, AT_ONE, FLOOD], ids=["equal", "uneven", "at one", "flood"])
@pytest.mark.parametrize("network", [Network(0.0, 0.0), Network(1.0, 0.3)], ids=["fast", "slow and lossy"])
def test_three_routers_admit_what_one_does(network: Network, rates: tuple[float, ...], seed: int) -> None:
    assert 0.97 <= beside_one(rates, seed, network) <= 1.03


@pytest.mark.parametrize("seed", SEEDS)
def test_a_limit_of_requests_holds_too(seed: int) -> None:
    admitted = used(EQUAL, seed, Network(), requests=60).total()
    assert 0.97 * 660 <= admitted <= 1.03 * 660


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("deaf", [False, True], ids=["cut off", "deaf"])
def test_one_that_is_cut_off_adds_its_own_limit_at_most(deaf: bool, seed: int) -> None:
    network = Network(cut="r0", deaf=deaf)
    parts = used(EQUAL, seed, network)
    assert beside_one(EQUAL, seed, network) <= 2.03
    others = (parts["r1"] + parts["r2"]) / used((10.0,), seed, Network()).total()
    assert others <= (0.1 if deaf else 1.03), "who hears it leaves it the limit"


@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_cut_a_tenant_waits_three_minutes_at_most(seed: int) -> None:
    """It has taken five minutes' worth too much, and pays for three of them."""
    network = Network(cut="r0", until=300.0)
    total = beside_one(EQUAL, seed, network)
    assert 1.2 <= total <= 1.35, total


# ---- shares


def share_of_a(where: tuple[str, ...], seed: int, network: Network) -> float:
    """Two tenants with backlog at routers that start as much: "ab" at this one both wait, "a" only the first."""
    world, started = World(len(where), keys_text("ab"), seed, network), Counter[str]()
    for router, names in zip(world.routers, where, strict=True):
        for name in names:
            router.limits.of(router.tenant(name)).charge(1, 0.0)
            for _ in range(4):
                router.queue.push(world.waiting(router.tenant(name)))
        world.starts(router, 2.0, started)
    world.run(SECONDS)
    return started["a"] / started.total()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("where", "right", "before"),
    [
        (("ab", "ab", "ab"), 1 / 2, 1 / 2),
        (("a", "ab"), 1 / 2, 3 / 4),
        (("ab", "ab", "a"), 1 / 2, 2 / 3),
        (("a", "ab", "b"), 1 / 2, 1 / 2),
        (("ab", "a", "a"), 2 / 3, 5 / 6),  # two routers have nobody else to start
    ],
    ids=["both everywhere", "a | ab", "ab | ab | a", "a | ab | b", "ab | a | a"],
)
def test_tenants_share_over_all_routers(where: tuple[str, ...], right: float, before: float, seed: int) -> None:
    assert share_of_a(where, seed, Network()) == pytest.approx(right, abs=0.05)
    assert share_of_a(where, seed, Network(loss=1.0)) == pytest.approx(before, abs=0.05)
