"""Hears of storages that torch has freed. Torch frees them on any thread, with and without the interpreter's lock, and
in the middle of raising an exception: no Python may run there. So the function that it calls is a few machine
instructions that write the record's address into a ring.
"""

from __future__ import annotations

import ctypes
import threading

import llvmlite.binding as llvm
import numpy as np

SLOTS = 1 << 20  # that may be freed between two calls of `take`
CODE = """
define void @let_go(ptr %record) {{
  %count = inttoptr i64 {count} to ptr
  %number = atomicrmw add ptr %count, i64 1 seq_cst
  %slot = and i64 %number, {mask}
  %ring = inttoptr i64 {ring} to ptr
  %place = getelementptr i64, ptr %ring, i64 %slot
  %address = ptrtoint ptr %record to i64
  store atomic i64 %address, ptr %place release, align 8
  ret void
}}
"""


class Freed:
    """`function`: the address of a C function of a record, for torch to call. Lives as long as the process."""

    def __init__(self) -> None:
        self._count = np.zeros(1, np.int64)
        self._ring = np.zeros(SLOTS, np.int64)
        self._taken = 0
        self._lock = threading.Lock()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        code = CODE.format(count=self._count.ctypes.data, ring=self._ring.ctypes.data, mask=SLOTS - 1)
        machine = llvm.Target.from_default_triple().create_target_machine()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code), machine)
        engine.finalize_object()
        self.function: int = engine.get_function_address("let_go")
        for kept in (self, engine):  # storages may be freed after the interpreter's end
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def take(self) -> list[int]:
        """Addresses of the records that were let go since the last call."""
        if self._taken == self._count[0]:
            return []
        with self._lock:
            found = []
            while self._taken < self._count[0]:
                slot = self._taken % SLOTS
                if not self._ring[slot]:  # another thread has its number and is about to write
                    break
                found.append(int(self._ring[slot]))
                self._ring[slot] = 0
                self._taken += 1
        return found
