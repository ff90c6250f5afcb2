"""Nodes on 16 cores, in simulated time, on the compiled changes of the table: no core has two that compute, a core is
given back in time, none is lost, whoever is killed or stopped in whatever moment."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numba import types

from shared.kernel.code.jit import compile_c
from shared.kernel.team import core_words
from shared.kernel.team.core_words import GUEST, HOLDER, LINE_BYTES, PATIENCE_NS
from shared.kernel.team.team import system_calls

NUM_CORES = 16
LONGEST_SHARE_MS = 2.0
PATIENCE_MS = PATIENCE_NS / 1e6
LIFE_MS = 400.0


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


@dataclass(slots=True)
class Node:
    """`own`: its cores. `inside`: cores where its threads compute, and until when the share lasts."""

    slot: int
    own: tuple[int, ...]
    works: bool = False
    is_alive: bool = True
    is_stopped: bool = False
    waits_since: dict[int, float] = field(default_factory=dict)  # own cores that a guest is still on
    on_own: set[int] = field(default_factory=set)
    as_guest: dict[int, float] = field(default_factory=dict)  # core -> end of the share
    heard: dict[int, int] = field(default_factory=dict)  # sleeping threads: the bell they saw


class Machine:
    """Events in the order of a random clock; each is one atomic change by one thread of one node."""

    def __init__(self, seed: int) -> None:
        self.dice, self.now = random.Random(seed), 0.0
        self.lines = np.zeros((NUM_CORES, LINE_BYTES // 8), np.int64)
        self._calls = np.array(system_calls(), np.int64)
        cores = list(range(NUM_CORES))
        self.dice.shuffle(cores)
        cuts = sorted(self.dice.sample(range(1, NUM_CORES), self.dice.randint(1, 5)))
        bounds = [0, *cuts, NUM_CORES]
        shares = [tuple(cores[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        self.nodes = [Node(slot, own) for slot, own in enumerate(shares)]
        self.nodes.append(Node(len(shares), shares[0]))  # two that were given the same cores
        self.seen: Counter[str] = Counter()

    def change(self, name: str, core: int, node: Node) -> int:
        line = self.lines.ctypes.data + core * LINE_BYTES
        return int(changes()[name].ctypes(self._calls.ctypes.data, line, node.slot))

    def bell(self, core: int, node: Node) -> int:
        return int(self.lines[core, core_words.BELLS // 8 + node.slot])

    def live(self) -> None:
        while self.now < LIFE_MS:
            self.now += self.dice.expovariate(20.0)
            self.end_shares()
            node = self.dice.choice(self.nodes)
            if node.is_alive and not node.is_stopped:
                self.act(node)
            self.check()
            if self.dice.random() < 0.003:
                self.strike(self.dice.choice([node for node in self.nodes if node.as_guest] or self.nodes))
        self.end()

    def act(self, node: Node) -> None:
        if not node.works and self.dice.random() < 0.2:
            self.begin(node)
        elif node.works and self.dice.random() < 0.01:
            self.rest(node)
        for core in list(node.waits_since):
            self.wait_for_guest(node, core)
        if node.works:
            self.help_out(node)

    def end_shares(self) -> None:
        for node in self.nodes:
            if node.is_alive and not node.is_stopped:
                for core in [core for core, until in node.as_guest.items() if self.now >= until]:
                    self.next_share(node, core)

    def begin(self, node: Node) -> None:
        node.works = True
        for core in node.own:
            self.change("hold", core, node)
            node.waits_since[core] = self.now

    def rest(self, node: Node) -> None:
        """Between programs: its guests elsewhere are gone, as a program ends when all of its threads are out."""
        for core in list(node.as_guest):
            del node.as_guest[core]
            self.change("leave", core, node)
        node.works = False
        node.on_own.clear()
        node.heard.clear()
        for core in node.own:
            self.change("release", core, node)

    def wait_for_guest(self, node: Node, core: int) -> None:
        """As the compiled loop of this name; the thread that waits may be late, when its node rests already."""
        waited = self.now - node.waits_since[core]
        if not self.lines[core, 0] >> HOLDER + node.slot & 1:
            self.seen["late"] += 1
            del node.waits_since[core]
            return
        if self.lines[core, 0] & GUEST == 0:
            self.seen["given back"] += waited > 0
        elif waited < PATIENCE_MS:
            return
        else:
            before = int(self.lines[core, 0])
            self.change("take_back", core, node)
            assert self.lines[core, 0] == before & ~GUEST
            self.seen["taken back"] += 1
            assert any(other.is_stopped or not other.is_alive for other in self.nodes), "it had only to wait"
        del node.waits_since[core]
        node.on_own.add(core)

    def help_out(self, node: Node) -> None:
        """One of its threads looks after a core that is not the node's own: only if it never slept, or was woken."""
        core = self.dice.randrange(NUM_CORES)
        if core in node.own or core in node.as_guest or node.heard.get(core) == self.bell(core, node):
            return
        heard = self.bell(core, node)
        if self.change("enter", core, node):
            node.as_guest[core] = self.now + self.dice.uniform(0, LONGEST_SHARE_MS)
            self.seen["guest"] += 1
        elif self.change("ask", core, node):
            node.heard[core] = heard

    def next_share(self, node: Node, core: int) -> None:
        if self.change("must_leave", core, node):
            del node.as_guest[core]
            self.change("leave", core, node)
            node.heard.pop(core, None)
        else:
            node.as_guest[core] = self.now + self.dice.uniform(0, LONGEST_SHARE_MS)

    def strike(self, node: Node) -> None:
        """Kill it, stop it, let it go on, or find it dead and clear up behind it."""
        if not node.is_alive:
            self.forget(node)
            self.nodes[self.nodes.index(node)] = Node(node.slot, node.own)  # started again
        elif node.is_stopped:
            node.is_stopped = False
            node.as_guest = dict.fromkeys(node.as_guest, self.now)  # the share was as good as over
        elif self.dice.random() < 0.5:
            node.is_alive = False
            self.seen["killed"] += 1
        else:
            node.is_stopped = True
            self.seen["stopped"] += 1

    def forget(self, node: Node) -> None:
        for core in range(NUM_CORES):
            line = self.lines.ctypes.data + core * LINE_BYTES
            core_words.make_forget().ctypes(self._calls.ctypes.data, line, node.slot)

    def check(self) -> None:
        """Of those that run now: a guest is alone on its core, holders have no guest beside them."""
        for core in range(NUM_CORES):
            running = [node for node in self.nodes if node.is_alive and not node.is_stopped]
            guests = [node for node in running if core in node.as_guest and self.now < node.as_guest[core]]
            holders = [node for node in running if core in node.on_own]
            assert len(guests) <= 1 and not (guests and holders), (core, guests, holders)

    def end(self) -> None:
        """When all that live rest and the dead are cleared away, nobody has anything; and whoever asked was told."""
        for node in self.nodes:
            if node.is_alive:
                self.rest(node)
            else:
                self.forget(node)
        assert not self.lines[:, 0].any()


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_no_core_has_two_and_none_is_lost(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 6):
        machine = Machine(seed)
        machine.live()
        seen += machine.seen
    assert all(seen[what] > 3 for what in ("guest", "given back", "taken back", "killed", "stopped")), seen


def test_who_asked_for_a_core_hears_when_it_is_free() -> None:
    for free in free_by_holder, free_by_guest:
        machine = Machine(1)
        holder, guest, third = machine.nodes[0], machine.nodes[1], machine.nodes[2]
        core = holder.own[0]
        before = machine.bell(core, third)
        free(machine, core, holder, guest, third)
        assert machine.bell(core, third) == before + 1 and machine.lines[core, 0] == 0
        assert machine.change("enter", core, third)


def free_by_holder(machine: Machine, core: int, holder: Node, guest: Node, third: Node) -> None:
    machine.change("hold", core, holder)
    assert machine.change("ask", core, third) and not machine.change("enter", core, third)
    machine.change("release", core, holder)


def free_by_guest(machine: Machine, core: int, holder: Node, guest: Node, third: Node) -> None:
    assert machine.change("enter", core, guest)
    assert machine.change("ask", core, third) and not machine.change("enter", core, third)
    machine.change("leave", core, guest)


def test_a_thread_whose_node_rests_already_waits_for_nobody() -> None:
    machine = Machine(1)
    late, guest = machine.nodes[0], machine.nodes[1]
    core = late.own[0]
    assert machine.change("enter", core, guest)
    machine.change("wait_for_guest", core, late)
    assert machine.lines[core, 0] == guest.slot + 1


def test_a_guest_that_lost_its_core_takes_nothing_with_it() -> None:
    machine = Machine(1)
    holder, guest = machine.nodes[0], machine.nodes[1]
    core = holder.own[0]
    assert machine.change("enter", core, guest) and not machine.change("must_leave", core, guest)
    machine.change("hold", core, holder)
    assert machine.change("must_leave", core, guest)
    machine.change("take_back", core, holder)
    assert machine.change("must_leave", core, guest)
    machine.change("leave", core, guest)
    assert machine.lines[core, 0] == 1 << HOLDER + holder.slot
    machine.change("release", core, holder)
    assert machine.change("enter", core, holder) and machine.change("must_leave", core, guest), "it is another's"
    machine.change("leave", core, guest)
    assert machine.lines[core, 0] == holder.slot + 1
