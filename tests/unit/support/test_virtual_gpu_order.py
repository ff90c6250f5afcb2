"""Each way to get order or lifetime wrong on a GPU is seen on the deferring virtual one, and the right way is clean.

A pattern is run under many seeds. Wrong: under some seed its numbers are wrong, or torch's race detector reports it, or
both; each test says which. Right: neither, under no seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tests.support.virtual_gpu.device import VirtualGpu, VirtualStream, make_device
from tests.support.virtual_gpu.races import RaceError

SEEDS = 40
WANTED = [1, 2, 3, 4]
Pattern = Callable[[VirtualGpu, bool], torch.Tensor]  # whether it is done right; gives WANTED if so


def ready(gpu: VirtualGpu, values: list[int] = WANTED) -> torch.Tensor:
    """On the device, and nothing left to wait for."""
    made = torch.tensor(values, device=gpu.device)
    gpu.synchronize(gpu.device)
    return made


def pinned(gpu: VirtualGpu, values: list[int] = WANTED) -> torch.Tensor:
    return gpu.pinned((len(values),), torch.int64).copy_(torch.tensor(values))


def wrong_numbers(pattern: Pattern, right: bool) -> int:
    """Under how many seeds; without the race detector, which would stop it."""
    results = [pattern(make_device("deferring", seed, sanitize=False), right) for seed in range(SEEDS)]
    return sum(result.tolist() != WANTED for result in results)


def races(pattern: Pattern, right: bool) -> str:
    """The reports under one seed."""
    gpu = make_device("deferring", 1)
    if right:
        pattern(gpu, True)
        return "\n".join(gpu.races)
    with pytest.raises(RaceError) as raised:
        pattern(gpu, False)
    return str(raised.value)


def test_a_missing_wait_between_streams() -> None:
    def pattern(gpu: VirtualGpu, right: bool) -> torch.Tensor:
        x, writer, reader = ready(gpu, [0] * 4), gpu.new_stream(gpu.device), gpu.new_stream(gpu.device)
        fresh, event = pinned(gpu), gpu.new_event()
        with gpu.use_stream(writer):
            x.copy_(fresh, non_blocking=True)
            event.record()
        if right:
            reader.wait_event(event)
        with gpu.use_stream(reader):
            return (x + 0).cpu()

    assert wrong_numbers(pattern, False) and not wrong_numbers(pattern, True)
    assert "not ordered behind" in races(pattern, False) and not races(pattern, True)


def test_a_mark_of_another_stream_does_not_order_copied_lengths() -> None:
    """The length mirror's copies ran on torch's default stream, and the forward waited for a mark of another
    stream. The pool's streams are non-blocking: nothing orders the two."""

    def pattern(gpu: VirtualGpu, right: bool) -> torch.Tensor:
        lengths, host = ready(gpu, [0] * 4), pinned(gpu)
        copier, forward = gpu.new_stream(gpu.device), gpu.new_stream(gpu.device)
        with gpu.use_stream(copier if right else gpu.current_stream()):
            lengths.copy_(host, non_blocking=True)
        planned = gpu.new_event()
        planned.record(copier)
        forward.wait_event(planned)
        with gpu.use_stream(forward):
            return (lengths + 0).cpu()

    assert wrong_numbers(pattern, False) and not wrong_numbers(pattern, True)
    assert "copy to device" in races(pattern, False) and not races(pattern, True)


def test_weights_cast_on_the_default_stream_race_the_forward() -> None:
    def pattern(gpu: VirtualGpu, right: bool) -> torch.Tensor:
        forward = gpu.new_stream(gpu.device)
        weights = ready(gpu).to(torch.float32)
        if right:
            gpu.synchronize(gpu.device)
        with gpu.use_stream(forward):
            return (weights * 1).cpu().long()

    assert wrong_numbers(pattern, False) and not wrong_numbers(pattern, True)
    assert races(pattern, False) and not races(pattern, True)


def read_elsewhere_and_dropped(gpu: VirtualGpu, keep: Callable[[torch.Tensor, VirtualStream], None]) -> torch.Tensor:
    """A temporary is made on the default stream, read on another stream behind an event, and dropped: the next
    allocation gets its memory. `keep` is called before it is dropped."""
    reader, made = gpu.new_stream(gpu.device), gpu.new_event()
    delta = torch.tensor(WANTED, device=gpu.device)
    made.record()
    reader.wait_event(made)
    with gpu.use_stream(reader):
        out = delta + 0
    keep(delta, reader)
    del delta
    torch.zeros(4, dtype=torch.int64, device=gpu.device)
    gpu.synchronize(gpu.device)
    return out.cpu()


def test_a_temporary_is_freed_while_another_stream_reads_it() -> None:
    """The race detector forgets freed memory, so only the numbers show it."""

    def pattern(gpu: VirtualGpu, right: bool) -> torch.Tensor:
        return read_elsewhere_and_dropped(
            gpu, lambda delta, reader: gpu.record_stream(delta, reader) if right else None
        )

    assert wrong_numbers(pattern, False) and not wrong_numbers(pattern, True)


def test_a_temporary_kept_until_its_reader_is_done() -> None:
    """As the engine does it: a lease holds the tensor until the step's event."""

    def pattern(gpu: VirtualGpu, right: bool) -> torch.Tensor:
        def hold(delta: torch.Tensor, reader: VirtualStream) -> None:
            read = gpu.new_event()
            read.record(reader)
            if right:
                read.synchronize()

        return read_elsewhere_and_dropped(gpu, hold)

    assert wrong_numbers(pattern, False) and not wrong_numbers(pattern, True)


def test_a_pinned_slot_is_written_again_before_it_was_copied() -> None:
    """The host is no stream: only the numbers show it."""

    def pattern(gpu: VirtualGpu, right: bool) -> torch.Tensor:
        slot, copied = pinned(gpu), gpu.new_event()
        x = slot.to(gpu.device, non_blocking=True)
        copied.record()
        if right:
            copied.synchronize()
        slot.zero_()
        return x.cpu()

    assert wrong_numbers(pattern, False) and not wrong_numbers(pattern, True)


def test_a_copy_to_the_host_is_read_before_it_came() -> None:
    def pattern(gpu: VirtualGpu, right: bool) -> torch.Tensor:
        copied = gpu.new_event()
        host = ready(gpu).to("cpu", non_blocking=True)
        copied.record()
        if right:
            copied.synchronize()
        seen = host.clone()
        gpu.synchronize(gpu.device)
        return seen

    assert wrong_numbers(pattern, False) and not wrong_numbers(pattern, True)


def test_a_step_s_buffer_is_overwritten_before_it_is_copied_out() -> None:
    """Write after read: the next step waits for the copy of the last, or has another buffer (H9)."""

    def pattern(gpu: VirtualGpu, right: bool) -> torch.Tensor:
        buffer, copy, forward = ready(gpu, [0] * 4), gpu.new_stream(gpu.device), gpu.new_stream(gpu.device)
        fresh, written, copied = ready(gpu), gpu.new_event(), gpu.new_event()
        with gpu.use_stream(forward):
            buffer.copy_(fresh)
            written.record()
        copy.wait_event(written)
        with gpu.use_stream(copy):
            host = buffer.to("cpu", non_blocking=True)
            copied.record()
        if right:
            forward.wait_event(copied)
        with gpu.use_stream(forward):
            buffer.zero_()
        gpu.synchronize(gpu.device)
        return host

    assert wrong_numbers(pattern, False) and not wrong_numbers(pattern, True)
    assert "zero_" in races(pattern, False) and not races(pattern, True)


def test_a_wait_takes_the_mark_that_is_there() -> None:
    """An event that is recorded again after the wait does not move the wait, and one never recorded orders nothing."""

    def pattern(gpu: VirtualGpu, right: bool) -> torch.Tensor:
        x, writer, reader = ready(gpu, [0] * 4), gpu.new_stream(gpu.device), gpu.new_stream(gpu.device)
        fresh, event = ready(gpu), gpu.new_event()
        if not right:
            reader.wait_event(event)
        with gpu.use_stream(writer):
            x.copy_(fresh)
            event.record()
        if right:
            reader.wait_event(event)
        with gpu.use_stream(reader):
            return (x + 0).cpu()

    assert wrong_numbers(pattern, False) and not wrong_numbers(pattern, True)
    assert races(pattern, False) and not races(pattern, True)


def test_times_are_told_when_the_device_got_there_only() -> None:
    gpu = make_device("deferring", laziness=1.0)
    first, last, untimed = gpu.new_event(timing=True), gpu.new_event(timing=True), gpu.new_event()
    with pytest.raises(ValueError, match="recorded"):
        first.elapsed_time(last)
    first.record()
    torch.zeros(4, device=gpu.device)
    last.record()
    with pytest.raises(torch.AcceleratorError, match="not ready"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) >= 0
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(untimed)


def test_an_error_of_a_kernel_comes_late_and_stays() -> None:
    """As an illegal address on a real device: seen at the next wait, and by every call behind it."""
    gpu = make_device("deferring", laziness=1.0)
    x = ready(gpu)[torch.tensor([7]).pin_memory().to(gpu.device, non_blocking=True)]
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="out of bounds|out of range"):
            x.cpu()


def test_a_host_that_only_asks_sees_the_device_move() -> None:
    gpu = make_device("deferring", laziness=1.0)
    event = gpu.new_event()
    assert event.query()
    torch.zeros(4, device=gpu.device)
    event.record()
    asked = 0
    while not event.query():
        asked += 1
        assert asked < 1000
    assert gpu.current_stream().query() in (True, False)


def test_a_script_says_what_runs() -> None:
    gpu = make_device("deferring", sanitize=False)
    x, stream = ready(gpu), gpu.new_stream(gpu.device)
    with gpu.held():
        with gpu.use_stream(stream):
            host = x.to("cpu", non_blocking=True)
            x.add_(1)
        assert host.tolist() != WANTED
        assert gpu.run(stream, 1) == 1 and host.tolist() == WANTED
        assert gpu.run(stream) == 1 and gpu.run(stream) == 0
    assert x.tolist() == [2, 3, 4, 5]


def step(x: torch.Tensor, choice: int) -> torch.Tensor:
    """With temporaries that are dropped at once."""
    made = [x + 1, x * 0.5, x.t().contiguous().view(3, 4), x.cumsum(0) / 4, torch.cat([x, x])[2:5]]
    return made[choice] - made[choice].mean()


def steps_on_streams(gpu: VirtualGpu, choices: list[tuple[int, int]]) -> torch.Tensor:
    """Each on a stream of its own choice, behind the last. What crosses streams is kept."""
    streams, last = [gpu.new_stream(gpu.device) for _ in range(3)], gpu.current_stream()
    kept = [torch.arange(12.0, device=gpu.device).view(3, 4)]
    for which, choice in choices:
        event = gpu.new_event()
        event.record(last)
        last = streams[which]
        last.wait_event(event)
        with gpu.use_stream(last):
            kept.append(step(kept[-1], choice))
    with gpu.use_stream(last):
        return kept[-1].cpu()


def test_temporaries_of_one_stream_may_be_dropped_at_once() -> None:
    """The allocator's rule: memory that was freed is its own stream's again, in order. No false alarm in a long chain
    of operators on three streams."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        choices = [(rng.randrange(3), rng.randrange(5)) for _ in range(30)]
        wanted = torch.arange(12.0).view(3, 4)
        for _, choice in choices:
            wanted = step(wanted, choice)
        assert torch.equal(steps_on_streams(make_device("deferring", seed), choices), wanted)
