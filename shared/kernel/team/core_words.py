"""Records who computes on which core of this machine. Memory that nodes share has a line of int64 words per core.

    word 0:   bits 0 to 15: the guest (slot + 1; 0: none) | bit 16 + slot: a holder (a node that needs its own core)
    word 1:   bit slot: a node that would like to be a guest
    word 8+:  a bell for each slot: a count that is increased before its waiters are woken

A node holds its own cores while it has work. A core without a holder may have one guest: another node's thread inside a
step. If several nodes hold a core, the system schedules them.

If a node dies, at worst a bell is not rung, and the waiting node asks for the core again with its next program.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import types

from shared.kernel.code.atomics import (
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
from shared.kernel.code.jit import compile_c, inlined

WANT, BELLS = 8, 64  # byte offsets of words 1 and 8 in a line
NUM_SLOTS = 40
LINE_BYTES = BELLS + NUM_SLOTS * 8
HOLDER, GUEST = 16, 0xFFFF  # number of the first holder's bit; mask of the guest's bits
PATIENCE_NS = 5_000_000  # a holder's longest wait for a guest


@inlined
def enter(line: int, slot: int) -> bool:
    done: bool = change_if(line, 0, slot + 1)
    return done


@inlined
def must_leave(line: int, slot: int) -> bool:
    """Return whether a guest's core has a holder or was taken back."""
    word: int = look_at(line)
    return word != slot + 1


@inlined
def leave(calls: int, line: int, slot: int) -> None:
    """Leave as a guest, unless the core was taken back."""
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
    """Wait, as a holder, until the guest leaves. After PATIENCE_NS take the core back.

    A late thread, whose node no longer holds the core, does not wait."""
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
    """Take the core from a guest, which notices later."""
    word = look_at(line)
    if _is_holder(word, slot):
        change_if(line, word, word - (word & GUEST))


@inlined
def _is_holder(word: int, slot: int) -> bool:
    return (word >> (HOLDER + slot)) & 1 != 0


@inlined
def ask(calls: int, line: int, slot: int) -> None:
    """Wake this node's sleeping thread once the core is free."""
    if not want(line, slot):
        ring(calls, line, slot)


@inlined
def want(line: int, slot: int) -> bool:
    """Ask to ring this node's bell once the core is free. Return whether anyone has the core now."""
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
    """Return a C function of (line, slot)."""

    def hold_core(line: int, slot: int) -> None:
        hold(line, slot)

    return compile_c(hold_core, types.void(types.int64, types.int64))


@functools.cache
def make_forget() -> Any:
    """Return a C function of (calls, line, slot), which removes a dead node's claims on a core.

    It may be called at any time."""

    def forget(calls: int, line: int, slot: int) -> None:
        keep_bits(line + WANT, ~(1 << slot))
        leave(calls, line, slot)
        release(calls, line, slot)

    return compile_c(forget, types.void(types.int64, types.int64, types.int64))
