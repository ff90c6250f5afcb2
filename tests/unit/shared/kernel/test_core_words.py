"""The compiled changes of a core's words, one by one: who has it, who must leave it, who hears that it is free."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numba import types

from shared.kernel.code.jit import compile_c
from shared.kernel.team import core_words
from shared.kernel.team.core_words import HOLDER, LINE_BYTES
from shared.kernel.team.team import system_calls


@functools.cache
def changes() -> dict[str, Any]:
    """The changes as C functions of (calls, line, slot)."""

    def enter(calls: int, line: int, slot: int) -> int:
        return core_words.enter(line, slot)

    def must_leave(calls: int, line: int, slot: int) -> int:
        return core_words.must_leave(line, slot)

    def leave(calls: int, line: int, slot: int) -> int:
        core_words.leave(calls, line, slot)
        return 0

    def hold(calls: int, line: int, slot: int) -> int:
        core_words.hold(line, slot)
        return 0

    def release(calls: int, line: int, slot: int) -> int:
        core_words.release(calls, line, slot)
        return 0

    def take_back(calls: int, line: int, slot: int) -> int:
        core_words.take_back(line, slot)
        return 0

    def ask(calls: int, line: int, slot: int) -> int:
        return core_words.want(line, slot)

    def wait_for_guest(calls: int, line: int, slot: int) -> int:
        core_words.wait_for_guest(calls, line, slot)
        return 0

    kind = types.int64(types.int64, types.int64, types.int64)
    made = {function.__name__: compile_c(function, kind) for function in (enter, must_leave, leave, hold, release)}
    made |= {function.__name__: compile_c(function, kind) for function in (take_back, ask, wait_for_guest)}
    return made


OWNER, GUEST, THIRD = range(3)  # slots of nodes


class Core:
    """The line of a core, which is the first node's."""

    def __init__(self) -> None:
        self.line = np.zeros(LINE_BYTES // 8, np.int64)
        self._calls = np.array(system_calls(), np.int64)

    def change(self, name: str, slot: int) -> int:
        return int(changes()[name].ctypes(self._calls.ctypes.data, self.line.ctypes.data, slot))

    def bell(self, slot: int) -> int:
        return int(self.line[core_words.BELLS // 8 + slot])


@pytest.mark.parametrize(("takes", "frees", "slot"), [("hold", "release", OWNER), ("enter", "leave", GUEST)])
def test_who_asked_for_a_core_hears_when_it_is_free(takes: str, frees: str, slot: int) -> None:
    core = Core()
    core.change(takes, slot)
    assert core.change("ask", THIRD) and not core.change("enter", THIRD)
    assert not core.bell(THIRD)
    core.change(frees, slot)
    assert core.bell(THIRD) == 1 and core.line[0] == 0
    assert core.change("enter", THIRD)


def test_a_thread_whose_node_rests_already_waits_for_nobody() -> None:
    core = Core()
    assert core.change("enter", GUEST)
    core.change("wait_for_guest", OWNER)
    assert core.line[0] == GUEST + 1


def test_a_guest_that_lost_its_core_takes_nothing_with_it() -> None:
    core = Core()
    assert core.change("enter", GUEST) and not core.change("must_leave", GUEST)
    for holder in (OWNER, THIRD):
        core.change("hold", holder)
    assert core.change("must_leave", GUEST)
    core.change("take_back", OWNER)
    assert core.change("must_leave", GUEST)
    core.change("leave", GUEST)
    assert core.line[0] == 1 << HOLDER + OWNER | 1 << HOLDER + THIRD
    core.change("release", OWNER)
    assert core.line[0] == 1 << HOLDER + THIRD
    core.change("release", THIRD)
    assert core.change("enter", OWNER) and core.change("must_leave", GUEST), "it is another's"
    core.change("leave", GUEST)
    assert core.line[0] == OWNER + 1
