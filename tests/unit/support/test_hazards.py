"""The hazard detector itself: which pairs are races, which edges order them, and what a report names. Every check has
an example that it must refuse beside one that it must let pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from shared.core.sampling_params import SamplingParams
from shared.device.events import Event
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, draw_jobs, make_core, run_local
from tests.support.cores.simulated_streams import World
from tests.support.hazards.attach import Hazards, watching
from tests.support.hazards.detector import Detector, HazardError
from tests.support.hazards.ledger import Ledger, Mode
from tests.support.hazards.storages import StorageMode, StorageWatch
from tests.support.hazards.streams import StreamWatch, edges

ONCE = np.ones(1, np.int64)


class Bench:
    """Two watched streams of a scripted world and one ledger."""

    def __init__(self) -> None:
        self.detector = Detector()
        self.storages = StorageWatch(self.detector)
        self.world = World.script()
        self.a, self.b = self.world.stream("a"), self.world.stream("b")
        self.ledger: Ledger = self.detector.ledger("buffer", "row", 8)
        for stream in (self.a, self.b):
            StreamWatch(self.detector, self.storages, stream, stream.name, dict)

    def touch(self, row: int, mode: Mode = Mode.WRITE, generation: int = 1) -> None:
        self.detector.access(self.ledger, [row], mode, ONCE * generation)

    def toucher(self, row: int, mode: Mode = Mode.WRITE, generation: int = 1) -> Callable[[], None]:
        return lambda: self.touch(row, mode, generation)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with edges(bench.detector), StorageMode(bench.storages):
        yield bench


@pytest.mark.parametrize(
    ("first", "second", "is_race"),
    [
        (Mode.WRITE, Mode.WRITE, True),
        (Mode.WRITE, Mode.READ, True),
        (Mode.READ, Mode.WRITE, True),
        (Mode.READ, Mode.READ, False),
    ],
)
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_an_unordered_conflicting_pair_is_a_race_in_any_order(
    bench: Bench, first: Mode, second: Mode, is_race: bool, order: str
) -> None:
    bench.a.launch(bench.toucher(3, first), label="forward(7)")
    bench.b.launch(bench.toucher(3, second), label="pull(9)")
    for name in order:
        bench.world.run(name)
    if not is_race:
        return bench.detector.check()
    with pytest.raises(HazardError) as caught:
        bench.detector.check()
    text = str(caught.value)
    for part in ("buffer, row 3", "stream a, forward(7)", "stream b, pull(9)", "tests/unit/support/test_hazards.py:"):
        assert part in text


def test_other_rows_and_the_padding_row_are_nobody_s_business(bench: Bench) -> None:
    bench.a.launch(bench.toucher(3))
    bench.b.launch(bench.toucher(4))
    bench.a.launch(bench.toucher(0))
    bench.b.launch(bench.toucher(0))
    bench.world.run_until_idle()
    bench.detector.check()


def test_a_wait_orders_and_only_what_was_before_the_fire(bench: Bench) -> None:
    ready = Event("ready")

    def publishes_then_writes_on() -> Iterator[None]:
        bench.touch(1)
        ready.fire()
        yield
        bench.touch(2)

    bench.a.launch(publishes_then_writes_on, fires=[ready])
    bench.b.wait(ready)
    bench.b.launch(bench.toucher(1, Mode.READ))
    bench.world.run_until_idle()
    bench.detector.check()
    bench.b.launch(bench.toucher(2, Mode.READ))
    bench.world.run_until_idle()
    with pytest.raises(HazardError, match="row 2"):
        bench.detector.check()


def test_only_synchronize_and_a_true_query_order_the_host(bench: Bench) -> None:
    for learn in ("synchronize", "query", "nothing"):
        done = bench.a.launch(bench.toucher(5)).done
        bench.world.run("a")
        if learn == "synchronize":
            done.synchronize()
        elif learn == "query":
            assert done.query()
        bench.touch(5, Mode.READ)
        if learn != "nothing":
            bench.detector.check()
    with pytest.raises(HazardError, match="row 5"):
        bench.detector.check()


def test_a_launch_is_ordered_behind_earlier_host_work_only(bench: Bench) -> None:
    bench.touch(1)
    bench.a.launch(bench.toucher(1))
    bench.world.run_until_idle()
    bench.detector.check()
    bench.a.launch(bench.toucher(2, Mode.READ))
    bench.touch(2)
    bench.world.run_until_idle()
    with pytest.raises(HazardError, match="row 2: read not ordered behind a write"):
        bench.detector.check()


def test_waits_of_a_skipped_closure_still_order_the_next_one(bench: Bench) -> None:
    done = bench.a.launch(bench.toucher(1)).done

    def fails() -> None:
        raise RuntimeError("injected")

    bench.b.launch(fails)
    bench.b.wait(done)
    bench.b.launch(bench.toucher(6))  # skipped with its epoch
    bench.b.reset()
    bench.b.launch(bench.toucher(1))
    bench.world.run_until_idle()
    bench.detector.check()


def test_a_stale_generation_is_an_error_even_on_one_stream(bench: Bench) -> None:
    bench.a.launch(bench.toucher(3, generation=2))
    bench.a.launch(bench.toucher(3, generation=1))
    bench.world.run_until_idle()
    with pytest.raises(HazardError, match="the next owner was here already"):
        bench.detector.check()


@pytest.mark.parametrize(("generation", "is_race"), [(1, True), (2, False)])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_checked_read_may_meet_another_owner_but_not_its_own(
    bench: Bench, generation: int, is_race: bool, order: str
) -> None:
    """Describing pages: generation and digest tell a new owner, but nothing tells a half-written page."""
    bench.a.launch(bench.toucher(3, Mode.CHECKED, 1))
    bench.b.launch(bench.toucher(3, Mode.WRITE, generation))
    for name in order:
        bench.world.run(name)
    if is_race:
        with pytest.raises(HazardError, match="checked read"):
            bench.detector.check()
    else:
        bench.detector.check()
        assert bench.detector.num_tolerated == 1


def test_a_ticket_is_read_after_its_end_and_behind_it(bench: Bench) -> None:
    ticket = bench.a.launch(lambda: 5)
    assert ticket.result is None
    with pytest.raises(HazardError, match="read before it ended"):
        bench.detector.check()
    bench.detector.errors.clear()
    bench.world.run("a")
    bench.b.launch(lambda: ticket.result)
    bench.world.run("b")
    with pytest.raises(HazardError, match="nothing orders the read"):
        bench.detector.check()
    bench.detector.errors.clear()
    bench.b.wait(ticket.done)
    bench.b.launch(lambda: ticket.result)
    bench.world.run("b")
    assert ticket.take() == 5
    bench.detector.check()


# ---- the second net


@pytest.mark.rule("H7")
def test_tensors_that_nobody_declared_are_watched_by_storage(bench: Bench) -> None:
    shared = torch.zeros(4)
    bench.a.launch(lambda: shared.add_(1), label="writes")
    bench.b.launch(lambda: shared[1:3] * 2, label="reads")
    bench.world.run_until_idle()
    with pytest.raises(HazardError, match=r"float32 tensor \(2,\): read not ordered behind a write"):
        bench.detector.check()


def test_a_new_tensor_in_an_old_one_s_place_is_another_storage(bench: Bench) -> None:
    for _ in range(50):
        bench.a.launch(lambda: torch.ones(64).add_(1))
        bench.b.launch(lambda: torch.ones(64).add_(1))
        bench.world.run_until_idle()
    bench.detector.check()


def test_a_view_is_no_access_and_numpy_is_a_read(bench: Bench) -> None:
    shared = torch.zeros(4)
    bench.a.launch(lambda: shared.add_(1))
    bench.b.launch(lambda: shared.view(2, 2)[0])
    bench.world.run_until_idle()
    bench.detector.check()
    bench.b.launch(lambda: shared.numpy())
    bench.world.run_until_idle()
    with pytest.raises(HazardError, match="read not ordered"):
        bench.detector.check()


@pytest.mark.parametrize("how", ["write", "read", "inside", "view"])
def test_a_registered_buffer_is_touched_by_its_accessors_only(bench: Bench, how: str) -> None:
    buffer = torch.zeros(8)
    bench.storages.protect("relay", buffer.data_ptr(), buffer.nbytes)

    def closure() -> None:
        if how == "write":
            buffer[2:4] = 1
        elif how == "read":
            buffer.sum()
        elif how == "view":
            buffer.view(2, 4)
        else:
            with bench.detector.scope("relay"):
                buffer[torch.tensor([1])] = 1

    bench.a.launch(closure)
    bench.world.run_until_idle()
    if how in ("inside", "view"):
        return bench.detector.check()
    with pytest.raises(HazardError, match="relay is (written|read) around its accessors by aten"):
        bench.detector.check()


# ---- the production engine


@pytest.mark.parametrize("backend", ["simulated", "cpu", "inline"])
@pytest.mark.parametrize(("width", "host_lengths"), [(1, False), (4, False), (4, True)])
def test_the_engine_has_no_hazard(hazards: Hazards, backend: str, width: int, host_lengths: bool) -> None:
    knobs = CoreKnobs(backend, width=width, needs_cpu_seq_lens=host_lengths, num_pages=30, chunk_size=20, seed=width)
    core = hazards.watch(make_core(knobs))
    jobs = draw_jobs(random.Random(width), 6, max_prompt=60)
    assert_streams(jobs, run_local(core, jobs, retract_every=6, rng=random.Random(1)))
    core.close()
    assert hazards.detector.num_accesses > 100 and hazards.storages.num_ops > 1000


def small_job(rid: int = 0) -> Job:
    return Job(rid, tuple(range(20)), SamplingParams(max_tokens=6, temperature=0.0), 5)


def break_and_run(change: Callable[..., None]) -> str:
    """The hazards found in one short run of a broken core."""
    with pytest.raises(HazardError) as caught, watching() as hazards:
        core = hazards.watch(make_core(CoreKnobs("simulated", page_size=4, chunk_size=8, seed=2)))
        change(core)
        run_local(core, [small_job(0), small_job(1)])
    return str(caught.value)


@pytest.mark.rule("I2")
def test_a_row_of_somebody_else_in_a_plan() -> None:
    def change(core) -> None:  # noqa: ANN001
        admit = core.scheduler.capacity.admit_waiting

        def swapped() -> None:
            admit()
            reqs = [chunk.request for chunk in core.queues.prefilling]
            if len(reqs) == 2:
                reqs[0].row, reqs[1].row = reqs[1].row, reqs[0].row

        core.scheduler.capacity.admit_waiting = swapped

    text = break_and_run(change)
    assert "'s, not " in text and "r0" in text and "r1" in text


@pytest.mark.rule("I8")
def test_pages_that_were_free_at_launch() -> None:
    def change(core) -> None:  # noqa: ANN001
        launch = core.engine.launch

        def leaky(plan):  # noqa: ANN001, ANN202
            core.kv.allocator.generation[int(plan.layout.page_table[0, 0])] += np.uint64(1)
            return launch(plan)

        core.engine.launch = leaky

    assert "were free when this was launched" in break_and_run(change)


def test_host_objects_in_a_closure() -> None:
    def change(core) -> None:  # noqa: ANN001
        forward = core.engine.worker.forward
        queues = core.queues

        def live(plan, lease):  # noqa: ANN001, ANN202
            assert queues.running.reqs is not None
            return forward(plan, lease)

        core.engine.worker.forward = live

    assert "ScheduleBatch.reqs is the host's" in break_and_run(change)


def test_off_means_that_nothing_is_left() -> None:
    before = (Event.__dict__["query"], Event.__dict__["fire"], World.__dict__["host_point"])
    with watching() as hazards:
        core = hazards.watch(make_core(CoreKnobs("inline")))
        run_local(core, [small_job()])
    assert (Event.__dict__["query"], Event.__dict__["fire"], World.__dict__["host_point"]) == before
    assert "launch" not in vars(make_core(CoreKnobs("inline")).streams.forward)
