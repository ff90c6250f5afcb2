"""What every stream backend must do: order, waits, failures, events, generators. The simulated world has a file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator

import pytest
import torch

from shared.core.errors import ConfigError
from shared.device.cpu import CpuStream
from shared.device.cuda import CudaStream
from shared.device.events import Event, EventNotFired, StreamSkipped
from shared.device.inline import InlineStream
from shared.device.stream import Stream
from shared.device.streams import StreamSet, make_streams
from tests.support.cores.simulated_streams import World, simulated_streams
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import make_device

KINDS = ("inline", "cpu", "simulated", "cuda eager", "cuda deferring")  # cuda: on the virtual GPU


@pytest.fixture(params=KINDS)
def streams(request: pytest.FixtureRequest) -> Iterator[StreamSet]:
    kind, _, mode = request.param.partition(" ")
    gpu = make_device(mode, seed=7) if mode else None
    made = simulated_streams(World(seed=7)) if kind == "simulated" else make_streams(kind, gpu=gpu)
    yield made
    made.stop()


def boom() -> None:
    raise ValueError("boom")


def test_a_wait_orders_across_streams(streams: StreamSet) -> None:
    seen: list[str] = []

    def produce() -> Generator[None, None, None]:
        seen.append("first half")
        yield
        seen.append("second half")

    ticket = streams.forward.launch(produce)
    streams.copy.wait(ticket.done)
    streams.copy.launch(lambda: seen.append("copy")).take(HANG_GUARD_S)
    assert seen == ["first half", "second half", "copy"]


def test_a_cpu_wait_blocks_the_stream_until_the_event_fires() -> None:
    gate = Event("gate")
    seen: list[str] = []
    stream = CpuStream("one")
    other = CpuStream("two")
    stream.wait(gate)
    ticket = stream.launch(lambda: seen.append("after"))
    other.launch(lambda: seen.append("other")).take(HANG_GUARD_S)
    assert not ticket.done.query()
    other.launch(lambda: seen.append("gate") or gate.fire()).take(HANG_GUARD_S)
    ticket.take(HANG_GUARD_S)
    assert seen == ["other", "gate", "after"]
    stream.stop(), other.stop()


def test_a_wait_on_a_failed_event_only_orders(streams: StreamSet) -> None:
    failed = streams.forward.launch(boom)
    streams.copy.wait(failed.done)
    assert streams.copy.launch(lambda: "ran").take(HANG_GUARD_S) == "ran"
    assert isinstance(failed.done.error, ValueError)


def test_after_a_failure_the_epoch_is_skipped_and_nobody_hangs(streams: StreamSet) -> None:
    fires = Event("publish_ready"), Event("publish_ready_2")
    first = streams.forward.launch(boom, fires=[fires[0]])
    second = streams.forward.launch(lambda: "never", fires=[fires[1]])
    with pytest.raises(ValueError, match="boom"):
        first.take(HANG_GUARD_S)
    with pytest.raises(StreamSkipped):
        second.take(HANG_GUARD_S)
    assert isinstance(fires[0].error, ValueError) and isinstance(fires[1].error, StreamSkipped)
    assert streams.copy.launch(lambda: 1).take(HANG_GUARD_S) == 1  # the other streams live


def test_reset_opens_an_epoch_that_runs_again(streams: StreamSet) -> None:
    first = streams.forward.launch(boom)
    old = streams.forward.launch(lambda: "old")
    streams.reset()
    new = streams.forward.launch(lambda: "new")
    assert new.take(HANG_GUARD_S) == "new"
    assert streams.forward._epochs.current == 1
    assert isinstance(first.error, ValueError) and isinstance(old.error, StreamSkipped)


def test_a_forgotten_arm_is_fired_with_an_error_before_done(streams: StreamSet) -> None:
    kept, forgotten = Event("kept"), Event("forgotten")
    order: list[str] = []
    forgotten.add_callback(lambda event: order.append(event.name))
    ticket = streams.forward.launch(lambda: kept.fire(), fires=[kept, forgotten], label="step 1")
    ticket.done.add_callback(lambda _: order.append("done"))
    ticket.take(HANG_GUARD_S)
    streams.stop()  # callbacks run beside those who wait
    assert kept.error is None
    assert isinstance(forgotten.error, EventNotFired) and "step 1" in str(forgotten.error)
    assert order == ["forgotten", "done"]


def test_a_generator_that_raises_midway_fails_like_any_closure(streams: StreamSet) -> None:
    early = Event("early")

    def closure() -> Generator[None, None, None]:
        early.fire()
        yield
        boom()

    ticket = streams.forward.launch(closure, fires=[early])
    with pytest.raises(ValueError, match="boom"):
        ticket.take(HANG_GUARD_S)
    assert early.error is None  # it fired before the failure


def test_closures_run_in_inference_mode(streams: StreamSet) -> None:
    def closure() -> Generator[None, None, tuple[bool, bool]]:
        before = torch.is_inference_mode_enabled()
        yield
        return before, torch.is_inference_mode_enabled()

    assert streams.forward.launch(closure).take(HANG_GUARD_S) == (True, True)
    assert not torch.is_inference_mode_enabled()


def test_the_clock_of_the_forward_s_work(streams: StreamSet) -> None:
    first, last = (streams.forward.launch(streams.clock.mark).take(HANG_GUARD_S) for _ in range(2))
    assert streams.clock.seconds(first, last) >= 0


def test_stop_skips_later_work_and_is_idempotent(streams: StreamSet) -> None:
    streams.stop()
    streams.stop()
    if isinstance(streams.forward, (InlineStream, CpuStream, CudaStream)):
        with pytest.raises(StreamSkipped):
            streams.forward.launch(lambda: 1).take(HANG_GUARD_S)


def test_cpu_thread_sets_itself_up() -> None:
    main_threads, others = torch.get_num_threads(), set(threading.enumerate())
    stream = CpuStream("forward", on_thread_start=lambda: torch.set_num_threads(1))
    name, threads, inference = stream.launch(
        lambda: (threading.current_thread().name, torch.get_num_threads(), torch.is_inference_mode_enabled())
    ).take(HANG_GUARD_S)
    assert (name, threads, inference) == ("stream-forward", 1, True)
    assert threading.current_thread().name != name and torch.get_num_threads() == main_threads
    stream.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == name and thread not in others]


def test_the_host_is_woken_for_what_it_waits_for_only() -> None:
    """Three closures make a step; one of them ends it."""
    calls: list[str] = []
    streams = make_streams("cpu", notify=lambda: calls.append(threading.current_thread().name))
    for stream in streams.all():
        for _ in range(3):
            stream.launch(lambda: None).take(HANG_GUARD_S)
    streams.stop()
    assert sorted(calls) == ["stream-cold"] * 3 + ["stream-copy"] * 3 + ["stream-transfer"] * 3


def test_cpu_stop_leaves_nobody_waiting() -> None:
    started, gate, arm = threading.Event(), threading.Event(), Event("arm")
    stream = CpuStream("forward")
    running = stream.launch(lambda: started.set() or gate.wait(HANG_GUARD_S))
    assert started.wait(HANG_GUARD_S)
    stream.wait(Event("never fires"))
    queued = stream.launch(lambda: "never", fires=[arm])
    stopper = threading.Thread(target=stream.stop)
    stopper.start()
    gate.set()
    stopper.join(HANG_GUARD_S)
    assert running.take(HANG_GUARD_S) is True
    with pytest.raises(StreamSkipped):
        queued.take(HANG_GUARD_S)
    assert isinstance(arm.error, StreamSkipped)


def test_cpu_thread_that_cannot_start_skips_instead_of_hanging(caplog: pytest.LogCaptureFixture) -> None:
    stream = CpuStream("forward", on_thread_start=boom)
    with pytest.raises(StreamSkipped):
        stream.launch(lambda: 1).take(HANG_GUARD_S)
    stream.stop()
    assert "on_thread_start failed" in caplog.text


@pytest.mark.parametrize("make", [lambda: InlineStream("one"), lambda: CpuStream("one")])
def test_an_exit_inside_a_closure_settles_the_ticket(make: Callable[[], Stream]) -> None:
    stream, arm = make(), Event("arm")

    def leave() -> None:
        raise SystemExit(3)

    if isinstance(stream, InlineStream):
        with pytest.raises(SystemExit):
            stream.launch(leave, fires=[arm])
    else:
        stream.launch(leave, fires=[arm]).done.synchronize(HANG_GUARD_S)
        stream.reset()
        assert stream.launch(lambda: "alive").take(HANG_GUARD_S) == "alive"
    assert isinstance(arm.error, SystemExit)
    stream.stop()


def test_inline_names_a_wait_that_can_never_end() -> None:
    stream = InlineStream("forward")
    stream.wait(Event("publish_ready"))
    with pytest.raises(RuntimeError, match="publish_ready"):
        stream.launch(lambda: None)


def test_events_fire_once_and_call_back_once(caplog: pytest.LogCaptureFixture) -> None:
    event, calls = Event("e"), []
    event.add_callback(calls.append)
    event.add_callback(lambda _: boom())
    assert not event.query()
    with pytest.raises(TimeoutError):
        event.synchronize(0.001)
    event.fire()
    event.fire(ValueError("late"))
    event.add_callback(calls.append)
    assert event.query() and event.error is None and calls == [event, event]
    assert "callback of event e failed" in caplog.text


@pytest.mark.rule("H8")
def test_cpu_streams_run_their_closures_on_threads_of_their_own() -> None:
    streams = make_streams("cpu")
    threads = {stream.launch(threading.get_ident).take(HANG_GUARD_S) for stream in streams.all()}
    assert len(threads) == len(streams.all()) and threading.get_ident() not in threads
    streams.stop()


def test_unknown_kind_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="inline, cpu, cuda$"):
        make_streams("gpu")
