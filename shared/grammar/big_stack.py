"""A thread to compile grammars on. llguidance recurses along chains of rules, and an overflow would end the process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_BYTES = 256 << 20  # of address space; memory is taken as it is used, 3.3 KB for each rule of a chain


def one_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread, which is there already."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    before = threading.stack_size(STACK_BYTES)
    try:
        executor.submit(int).result()  # the thread begins now, with this stack
    finally:
        threading.stack_size(before)
    return executor
