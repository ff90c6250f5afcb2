"""A team's threads come late, leave early, sleep while they wait, and every share is done once all the same."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.kernel.code.atomics import add_to, look_at, put, rest_a_moment
from shared.kernel.code.jit import NUM_SHARES, compile_task, longs_at
from shared.kernel.team.core_table import CoreTable, Owner
from shared.kernel.team.program import Program
from shared.kernel.team.team import Team
from tests.support.machine.patience import HANG_GUARD_S

ROOT = Path(__file__).parents[4]
NUM_TASKS, NUM_SHARES_EACH = 40, 8
# The words of a task: who did its shares (a word each), how long a share lasts, which worker waits for GO in its share.
# In `meet`, GO counts the shares that have begun.
DONE_BY, ROUNDS, HELD_WORKER, GO = range(2, 6)


def slow_task(words: Any, share: int, worker: int) -> None:
    """Notes who did the share. A share lasts some microseconds; one of the chosen worker's until it may go on."""
    total = share
    for n in range(words[ROUNDS]):
        total = (total * 31 + n) % 1000003
    if words[HELD_WORKER] == worker:
        put(words[GO] + 8, 1)
        while look_at(words[GO]) == 0:
            total = (total * 31 + 7) % 1000003
    longs_at(words[DONE_BY])[share] = longs_at(words[DONE_BY])[share] * 100 + worker + 1 + total // 1000003


compiled = functools.cache(lambda: compile_task(slow_task))


def meet(words: Any, share: int, worker: int) -> None:
    """Waits for all shares to begin, so each worker takes one."""
    longs_at(words[DONE_BY])[share] = worker
    add_to(words[GO], 1)
    while look_at(words[GO]) < words[NUM_SHARES]:
        rest_a_moment()


class Work:
    """A program of slow tasks; `done_by`: (tasks, shares), worker + 1 of who did it."""

    def __init__(self, team: Team, rounds: int = 3000, held_worker: int = -1) -> None:
        self._size = team.size
        self.done_by = np.zeros((NUM_TASKS, NUM_SHARES_EACH), np.int64)
        self.go = np.zeros(2, np.int64)
        words = np.zeros((NUM_TASKS, 6), np.int64)
        words[:, DONE_BY] = self.done_by.ctypes.data + self.done_by.strides[0] * np.arange(NUM_TASKS)
        words[:, ROUNDS], words[:, HELD_WORKER], words[:, GO] = rounds, held_worker, self.go.ctypes.data
        self.program = Program(team, [compiled()] * NUM_TASKS, words)
        words[:, NUM_SHARES] = NUM_SHARES_EACH

    def run(self) -> None:
        self.done_by[:] = 0
        self.program.run()
        assert ((self.done_by > 0) & (self.done_by <= self._size)).all(), "each share once"

    @property
    def is_held(self) -> bool:
        """The chosen worker is in a share."""
        return bool(self.go[1])

    def shares_of(self, worker: int) -> int:
        return int((self.done_by == worker + 1).sum())


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def cores() -> tuple[int, int]:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("one core: nothing to borrow")
    return usable[0], usable[-1]


@pytest.fixture
def table(tmp_path: Path, cores: tuple[int, int]) -> Iterator[CoreTable]:
    """Of a node with the first core, which would borrow the last."""
    made = CoreTable(Owner("here", cores[:1], cores if cores[0] != cores[1] else (1000,)), tmp_path / "cores")
    yield made
    made.close()


@pytest.fixture
def neighbour(tmp_path: Path, table: CoreTable, cores: tuple[int, int]) -> Iterator[CoreTable]:
    """A node whose core the last one is."""
    made = CoreTable(Owner("there", (table.owner.borrows[-1],), ()), tmp_path / "cores")
    yield made
    made.close()


def release(node: CoreTable) -> None:
    node._forget_all(node.slot)


def test_a_core_that_nobody_holds_is_used(table: CoreTable) -> None:
    team = table.team()
    work = Work(team)
    until(lambda: work.run() or work.shares_of(1) > 0)
    until(lambda: [use.guest for use in table.uses()] == [None, None])  # between programs
    team.close()


def test_a_core_that_is_held_is_left_alone(table: CoreTable, neighbour: CoreTable) -> None:
    neighbour.hold_own()
    team = table.team()
    work = Work(team)
    for _ in range(5):
        work.run()
        assert work.shares_of(1) == 0
    team.close()


def test_a_core_where_the_process_may_not_run_is_not_taken(tmp_path: Path, cores: tuple[int, int]) -> None:
    nowhere = os.sysconf("SC_NPROCESSORS_CONF") + 7
    table = CoreTable(Owner("here", cores[:1], (nowhere,)), tmp_path / "cores")
    team = table.team()
    work = Work(team)
    for _ in range(20):
        work.run()
        assert work.shares_of(1) == 0 and not table.borrowed()
    team.close()
    table.close()


def test_own_cores_are_held_from_the_first_program_until_rest(table: CoreTable) -> None:
    team = table.team()
    work = Work(team, rounds=10)
    assert team._crew is None
    for _ in range(2):
        work.run()
        assert team._crew is not None and table.uses()[0].holders == ("here",)
        team.rest()
        assert table.uses()[0].holders == ()
    work.run()
    team.close()
    assert table.uses()[0].holders == ()


def sleeps(thread: threading.Thread) -> bool:
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


def stays_asleep(thread: threading.Thread) -> bool:
    """In twenty looks: a thread that waits for the GIL sleeps for a moment, too."""
    for _ in range(20):
        if not sleeps(thread):
            return False
        time.sleep(0.001)
    return True


def helpers(team: Team) -> list[threading.Thread]:
    assert team._crew is not None
    return team._crew._threads


@contextlib.contextmanager
def running(work: Work) -> Iterator[None]:
    """In a thread of its own, and once more where it was over before the helper came. At the end the held share goes
    on."""
    is_over = threading.Event()

    def run() -> None:
        work.run()
        while not work.shares_of(1) and not is_over.is_set():
            work.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        work.go[0] = 1
        thread.join(HANG_GUARD_S)
    assert not thread.is_alive()


def test_a_helper_comes_in_the_middle_of_a_program(table: CoreTable, neighbour: CoreTable) -> None:
    """Its core becomes free while the leader is in its first share, and it sleeps."""
    neighbour.hold_own()
    team = table.team()
    Work(team).run()
    work = Work(team, held_worker=0)
    with running(work):
        until(lambda: work.is_held and sleeps(helpers(team)[0]))
        release(neighbour)
        until(lambda: work.shares_of(1) > 0)
    assert work.shares_of(0) > 0
    team.close()


def test_a_guest_leaves_after_its_share_when_a_holder_comes(table: CoreTable, neighbour: CoreTable) -> None:
    team = table.team()
    work = Work(team, held_worker=1)
    with running(work):
        until(lambda: work.is_held)
        neighbour.hold_own()
        assert table.uses()[1].guest == "here"
        work.go[0] = 1
        until(lambda: table.uses()[1].guest is None)
    assert work.shares_of(1) <= 1
    team.close()


def test_a_holder_waits_for_a_guest_but_not_for_ever(table: CoreTable, neighbour: CoreTable) -> None:
    """A guest that does not leave loses the core, and does no harm when it goes on."""
    guests = table.team()
    held = Work(guests, held_worker=1)
    with running(held):
        until(lambda: held.is_held)
        own = neighbour.team()
        waiting = threading.Thread(target=Work(own, rounds=10).run, daemon=True)
        waiting.start()
        waiting.join(HANG_GUARD_S)
        assert not waiting.is_alive() and table.uses()[1].guest is None and table.uses()[1].holders == ("there",)
    assert table.uses()[1].holders == ("there",)
    own.close()
    guests.close()


def test_who_waits_for_anothers_share_sleeps() -> None:
    team = Team(2)
    work = Work(team, rounds=10, held_worker=1)
    leader: list[threading.Thread] = []

    def run() -> None:
        leader.append(threading.current_thread())
        work.run()
        while not work.shares_of(1):
            work.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        until(lambda: work.is_held and stays_asleep(leader[0]))
    finally:
        work.go[0] = 1
        thread.join(HANG_GUARD_S)
    assert not thread.is_alive()
    team.close()


@pytest.mark.parametrize("size", [2, 3])
def test_a_thread_begins_each_task_at_the_same_place(size: int) -> None:
    """Then a row's numbers are in the cache of the thread that needs them next."""
    team = Team(size)
    workers, begun = np.zeros((NUM_TASKS, size), np.int64), np.zeros((NUM_TASKS, 1), np.int64)
    words = np.zeros((NUM_TASKS, 6), np.int64)
    for place, array in ((DONE_BY, workers), (GO, begun)):
        words[:, place] = array.ctypes.data + array.strides[0] * np.arange(NUM_TASKS)
    program = Program(team, [compile_task(meet)] * NUM_TASKS, words)
    thread = threading.Thread(target=program.run, daemon=True)
    thread.start()
    thread.join(HANG_GUARD_S)
    assert not thread.is_alive()
    assert (workers == np.arange(size)).all()
    team.close()


def test_threads_end_with_their_team() -> None:
    team = Team(3)
    Work(team, rounds=1).run()
    threads = helpers(team)
    assert len(threads) == 2 and all(thread.is_alive() for thread in threads)
    team.close()
    assert not any(thread.is_alive() for thread in threads)
    Work(team, rounds=1).run()
    threads = helpers(team)
    del team
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_no_helper_is_left_in_a_program_that_is_over() -> None:
    """Tiny programs, one after another: a late helper would take shares of the next one from under its feet."""
    team = Team(3)
    work = Work(team, rounds=0)
    for _ in range(3000):
        work.run()
    team.close()


def test_programs_of_two_threads_run_one_after_the_other() -> None:
    team = Team(2)
    works = [Work(team, rounds=100) for _ in range(4)]
    threads = [threading.Thread(target=lambda work=work: [work.run() for _ in range(50)]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
        assert not thread.is_alive()
    team.close()


GUEST = """
import sys
from pathlib import Path
from shared.kernel.team.core_table import CoreTable, Owner
from tests.unit.shared.kernel.test_team import Work
own, borrowed = int(sys.argv[2]), int(sys.argv[3])
team = CoreTable(Owner("guest", (own,), (borrowed,)), Path(sys.argv[1])).team()
work = Work(team)
while True:
    work.run()
    if work.shares_of(1):
        print(work.shares_of(1), flush=True)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_guest_costs_its_host_only_patience(
    tmp_path: Path, cores: tuple[int, int], end: signal.Signals
) -> None:
    """In a process of its own, in a moment of its own. A stopped one goes on, and its work is right."""
    table = CoreTable(Owner("host", cores[-1:], ()), tmp_path / "cores")
    team = table.team()
    work = Work(team, rounds=100)
    command = [sys.executable, "-c", GUEST, str(tmp_path / "cores"), str(cores[0]), str(cores[-1])]
    for _ in range(2):
        guest = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert guest.stdout is not None
        try:
            for _ in range(3):
                team.rest()
                assert guest.stdout.readline()
                work.run()
            team.rest()
            guest.send_signal(end)
            work.run()
            assert table.uses()[-1].holders == ("host",)
            if end == signal.SIGSTOP:
                guest.send_signal(signal.SIGCONT)
                team.rest()
                assert guest.stdout.readline(), "it counts its shares, each done once"
        finally:
            guest.kill()
            guest.wait()
            guest.stdout.close()
    team.close()
    table.clear_up()
    assert not any(use.holders or use.guest for use in table.uses())
    table.close()
