"""Who computes on which core of this machine: one line of words for each core, in memory that nodes share.

    word 0:   bits 0 to 15: the guest (slot + 1, 0: none) | bit 16 + slot: a node whose own core it is needs it
    word 1:   bit slot: a node that would like to be a guest
    word 8+:  a bell for each slot: counted up, and those who wait for it are woken

A node has a slot, and cores of its own. While it has work it holds these. A core that nobody holds may have one guest:
a thread of another node, inside a step. When a holder comes, the guest leaves at the end of its share of a task, within
milliseconds. The holder waits for that, but not for ever: a guest that was killed or stopped loses the core. Holders do
not wait for each other: nodes that were given the same core take turns on it, as the system likes.

All of it is compiled. Every change is one atomic operation, so a node that dies leaves nothing half done. A ring may be
lost with it: who asked for the core then asks again with its next program.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from shared.kernel.atomics import (
    add_to,
    change_if,
    exchange,
    keep_bits,
    look_at,
    now_ns,
    set_bits,
    wait_for_change,
    wake_all,
)
from shared.kernel.jit import compile_c, inlined

WANT, BELLS = 8, 64  # bytes from a line's start
NUM_SLOTS = 40
LINE_BYTES = BELLS + NUM_SLOTS * 8
HOLDER, GUEST = 16, 0xFFFF  # the first holder's bit; the guest's bits
PATIENCE_NS = 5_000_000  # a holder's, for a guest


@inlined
def enter(line: int, slot: int) -> bool:
    """As a guest."""
    done: bool = change_if(line, 0, slot + 1)
    return done


@inlined
def must_leave(line: int, slot: int) -> bool:
    """Whether a guest's core has a holder, or was taken from it."""
    word: int = look_at(line)
    return word != slot + 1


@inlined
def leave(calls: int, line: int, slot: int) -> None:
    """Of a guest; nothing happens where the core was taken from it."""
    word = look_at(line)
    while word & GUEST == slot + 1:
        if change_if(line, word, word - (slot + 1)):
            _ring_those(calls, line, word >> HOLDER if word >> HOLDER != 0 else exchange(line + WANT, 0))
            return
        word = look_at(line)


@inlined
def hold(line: int, slot: int) -> None:
    set_bits(line, 1 << (HOLDER + slot))


@inlined
def release(calls: int, line: int, slot: int) -> None:
    bit = 1 << (HOLDER + slot)
    if keep_bits(line, ~bit) & ~bit == 0:
        _ring_those(calls, line, exchange(line + WANT, 0))


@inlined
def wait_for_guest(calls: int, line: int, slot: int) -> None:
    """Of a holder: returns when it has the core. A guest that does not leave in time has it no longer. Of a thread that
    comes late, when its node holds the core no more: returns at once."""
    bell = line + BELLS + slot * 8
    heard = look_at(bell)
    if look_at(line) & GUEST == 0:
        return
    until = now_ns(calls) + PATIENCE_NS
    while True:
        word = look_at(line)
        left = until - now_ns(calls)
        if word & GUEST == 0 or not _is_holder(word, slot):
            return
        if left > 0:
            wait_for_change(calls, bell, heard, left)
            heard = look_at(bell)
        else:
            take_back(line, slot)


@inlined
def take_back(line: int, slot: int) -> None:
    """Of a holder that has waited long enough: the guest has the core no longer, and learns it when it goes on."""
    word = look_at(line)
    if _is_holder(word, slot):
        change_if(line, word, word - (word & GUEST))


@inlined
def _is_holder(word: int, slot: int) -> bool:
    return (word >> (HOLDER + slot)) & 1 != 0


@inlined
def ask(calls: int, line: int, slot: int) -> None:
    """For a thread of the node that sleeps until its bell rings: it comes when the core is free."""
    if not want(line, slot):
        ring(calls, line, slot)


@inlined
def want(line: int, slot: int) -> bool:
    """Ask that the node's bell be rung when the core becomes free. Return whether it is taken now."""
    set_bits(line + WANT, 1 << slot)
    word: int = look_at(line)
    return word != 0


@inlined
def ring(calls: int, line: int, slot: int) -> None:
    add_to(line + BELLS + slot * 8, 1)
    wake_all(calls, line + BELLS + slot * 8)


@inlined
def _ring_those(calls: int, line: int, slots: int) -> None:
    slot = 0
    while slots >> slot != 0:
        if (slots >> slot) & 1:
            ring(calls, line, slot)
        slot += 1


@functools.cache
def make_hold() -> Any:
    """A C function (line, slot)."""

    def hold_core(line: int, slot: int) -> None:
        hold(line, slot)

    return compile_c(hold_core, types.void(types.int64, types.int64))


@functools.cache
def make_forget() -> Any:
    """A C function (calls, line, slot): takes away what a dead node had. May run at the same time as all others."""

    def forget(calls: int, line: int, slot: int) -> None:
        keep_bits(line + WANT, ~(1 << slot))
        leave(calls, line, slot)
        release(calls, line, slot)

    return compile_c(forget, types.void(types.int64, types.int64, types.int64))
