"""The simulated world: it respects events, finds what is unordered, replays by seed, and can be scripted."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from shared.device.events import Event
from tests.support.cores.simulated_streams import DeadlockError, World

SEEDS = 60


def increments(world: World, *, ordered: bool) -> int:
    """Two streams add 1 to a shared number, reading and writing in two steps each."""
    number = [0]

    def add() -> Generator[None, None, None]:
        read = number[0]
        yield
        number[0] = read + 1

    first = world.stream("forward").launch(add, label="add 1")
    if ordered:
        world.stream("transfer").wait(first.done)
    second = world.stream("transfer").launch(add, label="add 2")
    second.take()
    first.take()
    return number[0]


def test_an_unordered_lost_update_is_found_within_few_seeds() -> None:
    results = [increments(World(seed), ordered=False) for seed in range(SEEDS)]
    assert 1 in results and 2 in results


def test_an_event_forbids_the_lost_update_in_every_order() -> None:
    assert {increments(World(seed), ordered=True) for seed in range(SEEDS)} == {2}


def test_an_event_fired_too_early_is_visible() -> None:
    """The publish-before-write bug: atomic closures would hide it, preemption points show it."""

    def reader_sees(seed: int) -> int:
        world, value, published = World(seed), [0], Event("publish")

        def writer() -> Generator[None, None, None]:
            published.fire()
            yield
            value[0] = 1

        world.stream("forward").launch(writer, fires=[published])
        world.stream("copy").wait(published)
        return world.stream("copy").launch(lambda: value[0]).take()

    assert {reader_sees(seed) for seed in range(SEEDS)} == {0, 1}


def test_a_seed_replays_exactly_and_seeds_differ() -> None:
    def timeline(seed: int) -> str:
        world = World(seed)
        increments(world, ordered=False)
        return world.timeline()

    assert timeline(3) == timeline(3)
    assert len({timeline(seed) for seed in range(SEEDS)}) > 5


def test_a_script_cannot_pass_a_wait() -> None:
    world, gate = World.script(), Event("gate")
    world.stream("a").wait(gate)
    ticket = world.stream("a").launch(lambda: 1)
    with pytest.raises(RuntimeError, match="gate"):
        world.run("a")
    gate.fire()
    world.run("a")
    assert ticket.result == 1


def test_a_deadlock_names_what_everybody_waits_for() -> None:
    world = World(0)
    world.stream("copy").wait(Event("publish_ready"))
    ticket = world.stream("copy").launch(lambda: 1)
    with pytest.raises(DeadlockError, match="copy: waits for Event\\(publish_ready, armed\\)"):
        ticket.take()
