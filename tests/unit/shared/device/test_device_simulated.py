"""The simulated world: it respects events, finds what is unordered, replays by seed, and can be scripted."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from shared.device.events import Event, StreamSkipped
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


def test_laziness_spans_an_eager_and_an_absent_host() -> None:
    def done_at_launch(seed: int, laziness: float | None) -> bool:
        world = World(seed, laziness=laziness)
        return world.stream("forward").launch(lambda: None).done.peek()

    assert all(done_at_launch(seed, 0.0) for seed in range(SEEDS))
    assert not any(done_at_launch(seed, 1.0) for seed in range(SEEDS))
    assert {done_at_launch(seed, None) for seed in range(SEEDS)} == {True, False}


def test_a_host_that_only_polls_sees_the_world_move() -> None:
    world = World(1, laziness=1.0)
    ticket = world.stream("forward").launch(lambda: 5)
    polls = 0
    while not ticket.done.query():
        polls += 1
        assert polls < 1000
    assert ticket.result == 5


def test_rare_changes_let_a_low_stream_overtake() -> None:
    """With rates of 0 one stream always wins; with changes both orders occur inside one run."""

    def order(change_rate: float) -> list[str]:
        world, seen = World(5, laziness=1.0, change_rate=change_rate), []
        for _ in range(20):
            for name in ("a", "b"):
                world.stream(name).launch(lambda name=name: seen.append(name))
        world.run_until_idle()
        return seen

    assert order(0.0) in (["a"] * 20 + ["b"] * 20, ["b"] * 20 + ["a"] * 20)
    assert order(0.2) not in (["a"] * 20 + ["b"] * 20, ["b"] * 20 + ["a"] * 20)


def test_a_script_chooses_which_stream_advances() -> None:
    world, seen = World.script(), []

    def steps(name: str) -> Generator[None, None, None]:
        for i in range(2):
            seen.append(f"{name}{i}")
            yield

    for name in ("a", "b"):
        world.stream(name).launch(lambda name=name: steps(name))
    assert seen == []
    world.run("b")
    world.run("a", steps=2)
    assert seen == ["b0", "a0", "a1"]
    assert world.run_stream("b") == 2
    assert seen[-1] == "b1"
    with pytest.raises(RuntimeError, match="nothing to run: idle"):
        world.run("b")


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


def test_a_closure_that_blocks_is_an_error_not_a_hang() -> None:
    world = World.script()
    late = world.stream("a").launch(lambda: 1)
    ticket = world.stream("b").launch(late.done.synchronize)
    world.run("b")
    assert isinstance(ticket.error, DeadlockError)


def test_skips_take_their_turn_and_reset_keeps_old_work_skipped() -> None:
    world = World.script()
    stream = world.stream("forward")

    def fails() -> Generator[None, None, None]:
        yield
        raise ValueError("boom")

    first, old = stream.launch(fails), stream.launch(lambda: "old")
    world.run("forward", steps=2)
    assert isinstance(first.error, ValueError) and not old.done.peek()
    stream.reset()
    new = stream.launch(lambda: "new")
    assert new.take() == "new" and isinstance(old.error, StreamSkipped)


def test_stop_closes_a_half_run_closure() -> None:
    world, closed = World.script(), []

    def half() -> Generator[None, None, None]:
        try:
            yield
            yield
        finally:
            closed.append(True)

    arm = Event("arm")
    ticket = world.stream("a").launch(half, fires=[arm])
    world.run("a")
    world.stream("a").stop()
    assert closed == [True] and isinstance(ticket.error, StreamSkipped) and isinstance(arm.error, StreamSkipped)


def test_the_timeline_is_readable() -> None:
    world, published = World.script(), Event("publish")
    world.stream("forward").launch(published.fire, fires=[published], label="step 1")
    world.stream("copy").wait(published)
    world.run("forward")
    text = world.timeline()
    assert "forward    launch   step 1" in text and "copy       wait     publish" in text
    assert "fire     publish" in text and "end      step 1" in text
    assert len(world.timeline(last=2).splitlines()) == 2
