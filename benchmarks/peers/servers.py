"""Each system as a server on this machine's loopback: started, ready when its block begins, gone when it ends.

Whoever stands here is given all cores of the machine, and nothing else is running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.cluster import baton_up
from benchmarks.peers.environments import PEERS
from deploy.cluster.own_cluster import HOST
from deploy.cluster.ports import free_port

MODEL = "bench"  # the name that every server gives the model
READY_GUARD_S = 900.0  # vLLM compiles its model when it starts for the first time
STOP_GUARD_S = 30.0
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2  # K and V, layers, KV heads, head size, bytes: the default model


@dataclass(frozen=True, slots=True)
class Room:
    """What a server must be able to hold: so many streams of so many tokens each, prompt and answer together."""

    streams: int
    tokens: int

    @property
    def kv_bytes(self) -> int:
        return self.streams * self.tokens * KV_BYTES_PER_TOKEN


Serve = Callable[[Room], AbstractContextManager[int]]  # yields the HTTP port


def baton(*flags: str) -> Serve:
    """Prefill and decode apart, default settings but for `flags`."""
    return lambda room: baton_up("--model", "smollm2", "--served-model-name", MODEL, *flags)


def baton_with_kv_of(room: Room) -> AbstractContextManager[int]:
    """Both nodes together have as many bytes of KV as the room needs."""
    return baton("--kv-bytes", str(room.kv_bytes // 2))(room)


def llama_server(programs: Path, file: Path, threads: int, *flags: str) -> Serve:
    """The server keeps no copies of prompts outside its KV: it would spend time and memory on them."""

    def serve(room: Room) -> AbstractContextManager[int]:
        port = free_port(HOST)
        command = [str(programs / "llama-server"), "--model", str(file), "--host", HOST, "--port", str(port)]
        command += ["--threads", str(threads), "--threads-batch", str(threads), "--cache-ram", "0"]
        command += ["--parallel", str(room.streams), "--ctx-size", str(room.streams * room.tokens), *flags]
        return served(command, {}, port)

    return serve


def vllm_server(programs: Path, folder: Path, threads: int) -> Serve:
    """Compiled, which is its fastest way here."""

    def serve(room: Room) -> AbstractContextManager[int]:
        port = free_port(HOST)
        # Its own command looks for a package called vllm, and this build has another name.
        command = [str(programs / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", "2048"]
        command += ["--host", HOST, "--port", str(port)]
        command += ["--max-num-seqs", str(room.streams)]
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CACHE_ROOT": str(PEERS / "vllm-cpu" / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        }
        return served(command, environment, port)

    return serve


@contextlib.contextmanager
def served(command: Sequence[str], environment: Mapping[str, str], port: int) -> Iterator[int]:
    """Yields the port once GET /health answers with 200. RuntimeError with the last words of one that never does."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_healthy(process, port, Path(log.name))
            yield port
        finally:
            stop_group(process)


def wait_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_GUARD_S
    address = f"http://127.0.0.1:{port}/health"
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5) as reply:
            if reply.status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"{process.args} did not get ready:\n{log.read_text(errors='replace')[-3000:]}")


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """The server and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_GUARD_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def pss_mib() -> float:
    """Memory of all processes below this one, MiB: what several of them share is counted once (Linux only)."""
    kib = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            kib += pss_kib(Path(f"/proc/{child.pid}/smaps_rollup").read_text())
    return kib / 1024


def pss_kib(rollup: str) -> int:
    """Of one process, out of the text of its smaps_rollup."""
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
