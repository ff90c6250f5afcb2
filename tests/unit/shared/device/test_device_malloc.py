"""Freed memory stays with the process: the second use of a large block faults no page in. After loading it is given
back once."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT_FAULTS = """
import ctypes, resource, sys
from shared.device.malloc import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def use(num_bytes):
    block = libc.malloc(num_bytes)
    ctypes.memset(block, 1, num_bytes)
    libc.free(block)
use(8 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use(8 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

GIVE_BACK = """
import ctypes, psutil, sys, threading
from shared.device import malloc
getattr(malloc, sys.argv[1])()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def use():
    libc.free(libc.malloc(31 << 20))  # glibc's own thresholds rise with the largest freed block
    blocks = [libc.malloc(100 << 10) for _ in range(600)]
    for block in blocks:
        ctypes.memset(block, 1, 100 << 10)
    for block in blocks[1:]:
        libc.free(block)
before = psutil.Process().memory_info().rss
if sys.argv[2] == "main":
    use()
else:
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
malloc.give_freed_memory_back()
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.parametrize("settings", ["keep_freed_memory", "share_one_heap"])
@pytest.mark.parametrize("thread", ["main", "thread"])
def test_freed_blocks_are_given_back(settings: str, thread: str) -> None:
    command = [sys.executable, "-c", GIVE_BACK, settings, thread]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 4 << 20, "of 60 MiB"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_a_large_block_is_faulted_in_once() -> None:
    def faults(mode: str) -> int:
        run = subprocess.run([sys.executable, "-c", COUNT_FAULTS, mode], capture_output=True, text=True, check=True)
        return int(run.stdout)

    kept = faults("keep")
    assert kept < 200
    assert faults("default") > 4 * kept + 200
