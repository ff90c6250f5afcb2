"""A GPU that fails: what lasts ends the node, whose streams go on elsewhere; what does not costs one step. On the
virtual GPU; never run on a real one."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from decode_node.side import DecodeSide
from shared.config.processes import NodeProcessConfig
from shared.core.errors import ConfigError, DeviceLost, HandoffFailed, RankLost, StepFailed
from shared.core.states import FinishReason
from shared.device.cpu import do_nothing
from shared.device.events import Event, StreamSkipped, Ticket
from shared.device.faults import blames_device
from shared.engine.boundary import HostCopy, OnHost
from shared.engine.lease import StepLease
from shared.engine.masks import StepDrafts
from shared.engine.plan import StepPlan
from shared.engine.transfer_jobs import JobDone, TransferJobs
from shared.node import run
from shared.node.assembly import build_node
from shared.node.loop.context import NodeContext
from shared.node.records.core import NodeCore
from shared.observe.log import Logger
from shared.sched.loop import MOST_IN_A_ROW
from shared.sched.steps.events import Ended
from tests.support.cores.core_rig import Outcome, assert_whole, run_local
from tests.support.gpus.cuda_core import Kind, make_core
from tests.support.gpus.cuda_jobs import jobs
from tests.support.gpus.cuda_node import on_virtual_gpu, parts_of
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import VirtualGpu, make_device
from tests.support.virtual_gpu.failures import ILLEGAL

MANY_STEPS, MANY_ROUNDS = 200, 50
ROUND = 100  # requests that come again have numbers that differ by whole rounds
LASTING = ("launch", "kernel", "copy", "event", "stream", "wait")


@cache
def expected() -> Outcome:
    """The CPU's."""
    core = make_core(Kind())
    outcome = run_local(core, jobs(3), rng=random.Random(1))
    core.close()
    return outcome


def running(gpu: VirtualGpu, kind: Kind = Kind(), num_tokens: int = 3) -> tuple[NodeCore, Outcome]:  # noqa: B008
    """A core whose requests have said something."""
    core, outcome = make_core(kind, gpu), Outcome()
    for job in jobs(3):
        core.submit(job.request())
    while sum(map(len, outcome.streams.values())) < num_tokens:
        core.step(block=True)
        outcome.take(core)
    return core, outcome


def run_until_ended(core: NodeCore, outcome: Outcome, num_requests: int) -> None:
    for _ in range(MANY_STEPS):
        if len(outcome.ends) >= num_requests:
            break
        step(core)
        outcome.take(core)


def ask_again(core: NodeCore, number: int) -> None:
    """A slow host finds most events fired, and waits for few: so a failing wait may need many requests."""
    for job in jobs(3):
        core.submit(replace(job, rid=ROUND * number + job.rid).request())


def first_name(rid: str) -> str:
    return f"r{int(rid.removeprefix('r')) % ROUND}"


def errors(outcome: Outcome) -> list[Ended]:
    return [end for end in outcome.ends.values() if end.error]


def step(core: NodeCore) -> None:
    try:
        core.step(block=True)
    except torch.AcceleratorError as error:
        raise AssertionError("the error came past the steps, whose requests nobody gets back") from error


def close(core: NodeCore) -> None:
    """Within the hang guard: nothing waits for a device that does not move any more."""
    thread = threading.Thread(target=core.close, daemon=True)
    thread.start()
    thread.join(HANG_GUARD_S)
    assert not thread.is_alive(), "the end of a node hangs at its dead device"


@pytest.mark.parametrize(("mode", "after"), [("eager", 3), ("deferring", 2)])
@pytest.mark.parametrize("place", LASTING)
def test_a_cuda_error_ends_the_node_and_no_token_is_made_up(place: str, mode: str, after: int) -> None:
    """Wherever it shows: at a launch, in a kernel, in the copy of the results, at an event that somebody waits for.
    What was said before is right, nobody is blamed, and the node closes."""
    gpu = make_device(mode, seed=after)
    core, outcome = running(gpu)
    gpu.failures.fail_next(place, after)
    wanted = expected().streams
    with pytest.raises(DeviceLost):
        for number in range(1, MANY_ROUNDS):
            run_until_ended(core, outcome, number * len(jobs(3)))
            ask_again(core, number)
    outcome.take(core)
    for rid, stream in outcome.streams.items():
        assert stream == wanted[first_name(rid)][: len(stream)]
    assert not [end for end in outcome.ends.values() if end.reason is FinishReason.ERROR]
    close(core)


@pytest.mark.parametrize(("place", "mode"), [("memory", "eager"), ("launch", "eager"), ("wait", "eager")])
def test_an_error_that_passes_costs_one_step(place: str, mode: str) -> None:
    """Memory that runs out, and a CUDA error after which the device goes on: the rows of that step begin again."""
    gpu = make_device(mode, seed=5)
    core, outcome = running(gpu)
    gpu.failures.fail_next(place, 2, lasts=False)
    run_local(core, [], outcome=outcome)
    for number in range(1, MANY_ROUNDS):
        if gpu.failures.met.is_set():
            break
        ask_again(core, number)
        run_local(core, [], outcome=outcome)
    wanted = expected().streams
    assert outcome.streams == {rid: wanted[first_name(rid)] for rid in outcome.streams} and not errors(outcome)
    assert core.loop.num_failed_steps == 1
    assert_whole(core)
    core.close()


def test_memory_that_runs_out_for_one_request_ends_it_alone() -> None:
    """It is the largest: alone it runs out of memory again."""
    gpu = make_device("eager")
    core = make_core(Kind(), gpu)
    many = jobs(3)
    forward, longest = core.engine.worker.model.forward, max(len(job.prompt) for job in many)

    def forward_or_not(inputs: object, kv: object) -> object:
        if inputs.layout.max_seq_len >= longest:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(inputs, kv)  # type: ignore[arg-type]

    core.engine.worker.model.forward = forward_or_not  # type: ignore[method-assign, assignment]
    outcome = run_local(core, many, rng=random.Random(1))
    failed = [rid for rid, end in outcome.ends.items() if end.error]
    assert failed and all(isinstance(outcome.ends[rid].error, StepFailed) for rid in failed)
    assert f"r{min(many, key=lambda job: len(job.prompt)).rid}" not in failed
    assert_whole(core)
    core.close()


def test_failed_steps_in_a_row_end_a_node_with_a_failing_device() -> None:
    """With an error that does not name the device."""
    core, outcome = running(make_device("eager"))
    core.engine.worker.model.forward = lambda *_: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(DeviceLost, match="ZeroDivisionError"):
        for _ in range(200):
            core.step(block=True)
    outcome.take(core)
    assert 1 <= core.loop.num_failed_steps <= MOST_IN_A_ROW and not outcome.ends
    close(core)


def run_job(core: NodeCore, pulls: TransferJobs[int, int], job: Callable[[], int]) -> JobDone[int, int]:
    pulls.launch(0, job, "pull")
    pulls.synchronize()
    (done,) = pulls.take_done()
    return done


@pytest.mark.parametrize("place", ["launch", "kernel", "event"])
def test_a_transfer_finds_a_dead_device_where_nothing_steps(place: str) -> None:
    """A decode node would refuse all hand-offs for ever, one by one, and look well."""
    gpu = make_device("deferring", 4)
    core = make_core(Kind(), gpu)
    pulls: TransferJobs[int, int] = TransferJobs(core.engine)
    gpu.failures.fail_next(place)
    if place == "event":
        core.streams.forward.launch(lambda: None).done.synchronize(HANG_GUARD_S)
    pages = core.pool.pages_bytes
    assert isinstance(run_job(core, pulls, lambda: int(pages[1].fill_(3).sum())).error, HandoffFailed)
    with pytest.raises(DeviceLost):
        core.step()
    close(core)


def test_transfers_go_on_where_the_device_does() -> None:
    gpu = make_device("deferring", 1)
    core = make_core(Kind(), gpu)
    pulls: TransferJobs[int, int] = TransferJobs(core.engine)
    pages, ran = core.pool.pages_bytes, list[int]()
    gpu.failures.fail_next("wait", lasts=False)
    with gpu.held():
        core.engine.last_done = core.streams.forward.launch(lambda: pages[1].fill_(2)).done
        pulls.launch(0, lambda: ran.append(1) or 1, "pull", after_newest_step=True)
        assert gpu.failures.met.wait(HANG_GUARD_S)
    pulls.synchronize()
    (done,) = pulls.take_done()
    assert isinstance(done.error, HandoffFailed) and not ran, "its order was lost: it is not run"
    core.step()
    assert run_job(core, pulls, lambda: int(pages[1].fill_(3).sum())).value == 3 * core.pool.page_bytes
    assert_whole(core)
    core.close()


class Process:
    """A whole node, by its settings: sockets, threads, streams. Two requests are there once it is warm."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = make_device("eager", memory_bytes=1 << 28)
        self.before_warm_up: Callable[[], None] = do_nothing
        self.when_serving: Callable[[], None] = do_nothing
        self.make_side: build_node.SideOf = lambda ctx: DecodeSide(ctx, {})
        self._threads = set(threading.enumerate())
        self._warm_up = run.warm_up
        on_virtual_gpu(self.gpu, monkeypatch)
        monkeypatch.setattr(run, "warm_up", self._begin)
        monkeypatch.setattr(build_node, "transports", lambda *_: ())

    def _begin(self, core: NodeCore, log: Logger) -> None:
        self.before_warm_up()
        self._warm_up(core, log)
        for job in jobs(2):
            core.submit(job.request())
        self.when_serving()

    def run(self) -> int:
        """Its exit status, within the hang guard."""
        before = signal.signal(signal.SIGALRM, self._hung)
        signal.alarm(int(HANG_GUARD_S))
        try:
            parts = parts_of(memory={"max_running": 4}, role="decode")
            return run.run_node(NodeProcessConfig(parts), lambda ctx: self.make_side(ctx))
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def _hung(self, *_: object) -> None:
        raise AssertionError("the node neither ends nor says why")

    @property
    def is_gone(self) -> bool:
        """Whether no thread of its streams is left."""
        left = set(threading.enumerate()) - self._threads
        return not [thread for thread in left if thread.name.startswith(("marks-", "stream-"))]


@pytest.mark.parametrize(("when", "place"), [("warm-up", "kernel"), ("serving", "copy"), ("serving", "event")])
def test_the_process_ends_with_a_status_that_says_so(
    place: str, when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever supervises it starts it again."""
    process = Process(monkeypatch)
    fail = partial(process.gpu.failures.fail_next, place, 1)
    if when == "warm-up":
        process.before_warm_up = fail
    else:
        process.when_serving = fail
    assert process.run() == run.EXIT_FAILED and process.is_gone
    said = capsys.readouterr().err
    assert "this node can't go on" in said and ("ready" in said) == (when == "serving")


def test_a_cuda_error_outside_of_steps_ends_the_process_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_side(ctx: NodeContext) -> DecodeSide:
        raise torch.AcceleratorError(ILLEGAL)

    process = Process(monkeypatch)
    process.make_side = make_side
    try:
        status = process.run()
    except torch.AcceleratorError as error:
        raise AssertionError("it ended by a traceback") from error
    assert status == run.EXIT_FAILED and process.is_gone
    assert "this node can't go on" in capsys.readouterr().err


def test_a_lost_rank_is_given_up_before_the_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device runs may wait for that rank."""

    def lose(_: object) -> None:
        raise RankLost("rank 1 ended with status -9")

    process, gone = Process(monkeypatch), []
    monkeypatch.setattr(run.RankProcesses, "check_ranks", lose)
    monkeypatch.setattr(run.RankProcesses, "close", lambda _: gone.append(process.is_gone))
    assert process.run() == run.EXIT_FAILED and process.is_gone
    assert gone == [False]


def test_a_rank_s_config_error_in_loading_is_the_node_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> None:
        raise RankLost("rank 0 of 2, waiting: closed")

    def refuse(_: object) -> None:
        raise ConfigError("rank 1 can't work as configured")

    process, waits = Process(monkeypatch), []
    monkeypatch.setattr(run, "build_core", lose)
    monkeypatch.setattr(run.RankProcesses, "check_ranks", refuse)
    monkeypatch.setattr(run.RankProcesses, "wait_for_end", lambda _: waits.append(True))
    with pytest.raises(ConfigError):
        process.run()
    assert waits == [True] and process.is_gone


def test_what_does_not_close_keeps_nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_side(ctx: NodeContext) -> DecodeSide:
        side = DecodeSide(ctx, {})
        side.close = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
        return side

    process = Process(monkeypatch)
    process.make_side, process.when_serving = make_side, partial(process.gpu.failures.fail_next, "kernel")
    with pytest.raises(ZeroDivisionError):
        process.run()
    assert process.is_gone


def test_drafts_that_did_not_arrive_are_not_read() -> None:
    """Masks would be made of what stood in the slot before."""
    ticket = Ticket[HostCopy | None]("drafts")
    drafts = StepDrafts(Event("drafted"), copy=ticket)
    ticket.result = OnHost({"ids": torch.zeros(1, 3, dtype=torch.int64)})
    assert drafts.on_host() is not None
    ticket.done.fire(torch.AcceleratorError(ILLEGAL))
    assert drafts.on_host() is None


def test_a_failed_copy_of_drafts_is_the_step_s_error() -> None:
    """The copy of its results is only skipped, which says nothing of the device."""
    lease, copy = StepLease(1, StepPlan.__new__(StepPlan), None), Ticket[HostCopy | None]("drafts")
    lease.drafts, lease.result = StepDrafts(Event("drafted"), copy=copy), Ticket("results")
    for ticket, error in ((copy, torch.AcceleratorError(ILLEGAL)), (lease.result, StreamSkipped("no"))):
        ticket.error = error
        ticket.done.fire(error)
    with pytest.raises((torch.AcceleratorError, StreamSkipped)) as raised:
        lease.close()
    assert blames_device(raised.value)


def test_errors_of_the_device_in_all_their_words() -> None:
    """Older torch and libraries say so in plain RuntimeErrors."""
    blamed = [
        torch.AcceleratorError(ILLEGAL),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ]
    other = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shapes differ"), ValueError("CUDA error")]
    assert all(map(blames_device, blamed)) and not any(map(blames_device, other))
    failed = StepFailed("its forward failed")
    failed.__cause__ = blamed[0]
    assert blames_device(failed)
