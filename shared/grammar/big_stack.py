"""Starts a thread with a big stack to compile grammars, because llguidance recurses along rules.

A stack overflow would end the process.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_BYTES = 256 << 20  # reserved address space; a chain of rules uses 3.3 KB of stack per rule


def one_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor whose thread already runs."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    before = threading.stack_size(STACK_BYTES)
    try:
        executor.submit(int).result()  # starts the thread
    finally:
        threading.stack_size(before)
    return executor
