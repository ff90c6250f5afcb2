"""A team's compiled threads: one leads a program's tasks, the others join, help and leave.

    leader:    hold the own cores | open | wake helpers | tasks | close | wait until no helper is inside
    helper:    sleep | get the core | tasks, from the current one | give the core back | sleep

Threads take a task's shares until none is left, then wait for each other. So a helper may come late, and a guest may
leave after any share: this only slows the step. A thread begins each task in its own range of shares. Except in
attention, these are mostly the same rows, which its cache holds. A waiting thread spins for SPIN_NS, then sleeps. Each
make_* function returns a C function, whose first argument is the address of the team's int64 words.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from shared.kernel.code.atomics import add_to, call_task, look_at, now_ns, put, rest_a_moment, wait_for_change, wake_all
from shared.kernel.code.jit import NUM_SHARES, compile_c, inlined, longs_at, part_of
from shared.kernel.team import core_words as cores

# Words of a team: indices of constants and of the program; then byte offsets of words that change.
CALLS, SLOT, NUM_WORKERS, WORKERS = range(4)
NUM_TASKS, TASKS, COUNTERS = range(8, 11)
STOP, OPEN, PROGRAMS, CURRENT, HELD = (8 * word for word in range(16, 21))
ACTIVE, SLEEPERS, ALARM = (8 * word for word in (24, 32, 40))
NUM_WORDS = 48
LINE, IS_OWN = 0, 1  # words of a worker
WORKER_WORDS = 2

TASK_WORDS = 2  # words of a task: addresses of its function and of its words
MOST_RANGES = 8  # their counters fill a cache line
COUNTER_WORDS = 16  # words of a task's counters, on two cache lines: shares taken of each range | shares done
DONE = 64  # byte offset of the second cache line

SPIN_NS = 50_000
LOOKS = 64  # after this many reads of the awaited word, read the clock
NAP_NS = 1_000_000  # a waiting guest's sleep: well below a holder's patience
FINISHED, LEFT = True, False


@inlined
def _line(workers: int, worker: int) -> int:
    line: int = longs_at(workers)[worker * WORKER_WORDS + LINE]
    return line


@inlined
def _is_own(workers: int, worker: int) -> bool:
    own: bool = longs_at(workers)[worker * WORKER_WORDS + IS_OWN] != 0
    return own


@functools.cache
def make_leader() -> Any:
    def lead(team: int) -> None:
        known = longs_at(team)
        calls, slot, workers = known[CALLS], known[SLOT], known[WORKERS]
        if look_at(team + HELD) == 0:
            put(team + HELD, 1)
            for worker in range(known[NUM_WORKERS]):
                if _is_own(workers, worker):
                    cores.hold(_line(workers, worker), slot)
        put(team + CURRENT, 0)
        put(team + OPEN, add_to(team + PROGRAMS, 1) + 1)
        has_own = False
        for worker in range(1, known[NUM_WORKERS]):
            if _is_own(workers, worker):
                has_own = True
            else:
                cores.ask(calls, _line(workers, worker), slot)
        if has_own:
            add_to(team + ALARM, 1)
            wake_all(calls, team + ALARM)
        cores.wait_for_guest(calls, _line(workers, 0), slot)
        _do_tasks(team, 0)
        put(team + OPEN, 0)
        _wait_until(calls, team, team + ACTIVE, 0, True, 0, 0)

    return compile_c(lead, types.void(types.int64))


@functools.cache
def make_helper() -> Any:
    def help_out(team: int, worker: int) -> None:
        known = longs_at(team)
        calls, slot = known[CALLS], known[SLOT]
        line, is_own = _line(known[WORKERS], worker), _is_own(known[WORKERS], worker)
        bell = team + ALARM if is_own else line + cores.BELLS + slot * 8
        finished = 0
        while True:
            heard = look_at(bell)
            if look_at(team + STOP) != 0:
                return
            program = look_at(team + OPEN)
            if program != 0 and program != finished and worker < known[NUM_WORKERS]:
                if is_own:
                    cores.wait_for_guest(calls, line, slot)
                    if _help(calls, team, worker, program):
                        finished = program
                    continue
                if cores.enter(line, slot):
                    if _help(calls, team, worker, program):
                        finished = program
                    cores.leave(calls, line, slot)
                    continue
                if cores.want(line, slot):
                    wait_for_change(calls, bell, heard, 0)
            else:
                wait_for_change(calls, bell, heard, 0)

    return compile_c(help_out, types.void(types.int64, types.int64))


@inlined
def _help(calls: int, team: int, worker: int, program: int) -> bool:
    """Return whether the program needs no more help."""
    over = True
    add_to(team + ACTIVE, 1)  # before OPEN is read: after closing it, the leader waits for ACTIVE to be 0
    if look_at(team + OPEN) == program:
        over = _do_tasks(team, worker)
    add_to(team + ACTIVE, -1)
    if look_at(team + SLEEPERS) != 0:
        wake_all(calls, team + ACTIVE)
    return over


@inlined
def _do_tasks(team: int, worker: int) -> bool:
    """Take shares until the program ends. Return False if a guest must leave."""
    known = longs_at(team)
    calls, slot, num_tasks = known[CALLS], known[SLOT], known[NUM_TASKS]
    guests_line = 0 if _is_own(known[WORKERS], worker) else _line(known[WORKERS], worker)
    num_ranges = min(known[NUM_WORKERS], MOST_RANGES)
    home = ((worker + 1) * num_ranges - 1) // known[NUM_WORKERS]
    index = look_at(team + CURRENT)
    while index < num_tasks:
        if worker == 0:
            put(team + CURRENT, index)
        task = longs_at(known[TASKS] + index * TASK_WORDS * 8)
        counter = known[COUNTERS] + index * COUNTER_WORDS * 8
        shares = longs_at(task[1])[NUM_SHARES]
        share = _take(counter, shares, home, num_ranges)
        while share >= 0:
            call_task(task[0], task[1], share, worker)
            if add_to(counter + DONE, 1) + 1 == shares and look_at(team + SLEEPERS) != 0:
                wake_all(calls, counter + DONE)
            if guests_line != 0 and cores.must_leave(guests_line, slot):
                return LEFT
            share = _take(counter, shares, home, num_ranges)
        if not _wait_until(calls, team, counter + DONE, shares, False, guests_line, slot):
            return LEFT
        index += 1
    return FINISHED


@inlined
def _take(counter: int, shares: int, home: int, num_ranges: int) -> int:
    """Return a share of the home range, else of another, or -1."""
    for n in range(num_ranges):
        place = (home + n) % num_ranges
        first, end = part_of(shares, place, num_ranges)
        taken = counter + place * 8
        if first + look_at(taken) < end:  # adding would slow others
            share: int = first + add_to(taken, 1)
            if share < end:
                return share
    return -1


@inlined
def _wait_until(calls: int, team: int, address: int, wanted: int, exactly: bool, guests_line: int, slot: int) -> bool:
    """Wait until the word reaches `wanted` or, with `exactly`, equals it. Return False if a guest must leave first."""
    looks, began = 0, 0
    while True:
        seen = look_at(address)
        if seen == wanted or (seen > wanted and not exactly):
            return True
        if guests_line != 0 and cores.must_leave(guests_line, slot):
            return False
        looks += 1
        if looks % LOOKS != 0:
            rest_a_moment()
            continue
        now = now_ns(calls)
        if began == 0:
            began = now
        elif now - began > SPIN_NS:
            add_to(team + SLEEPERS, 1)
            seen = look_at(address)
            if seen != wanted and (seen < wanted or exactly):
                wait_for_change(calls, address, seen, NAP_NS if guests_line != 0 else 0)
            add_to(team + SLEEPERS, -1)


@functools.cache
def make_rest() -> Any:
    """Return the function that releases the node's own cores. Never call it while a program runs."""

    def rest(team: int) -> None:
        known = longs_at(team)
        if look_at(team + HELD) == 0:
            return
        put(team + HELD, 0)
        for worker in range(known[NUM_WORKERS]):
            if _is_own(known[WORKERS], worker):
                cores.release(known[CALLS], _line(known[WORKERS], worker), known[SLOT])

    return compile_c(rest, types.void(types.int64))


@functools.cache
def make_stop() -> Any:
    """Return the function that ends the helpers. A helper inside a program ends after the program."""

    def stop(team: int) -> None:
        known = longs_at(team)
        put(team + STOP, 1)
        add_to(team + ALARM, 1)
        wake_all(known[CALLS], team + ALARM)
        for worker in range(known[NUM_WORKERS]):
            cores.ring(known[CALLS], _line(known[WORKERS], worker), known[SLOT])

    return compile_c(stop, types.void(types.int64))
