"""Run `baton up` as a child of another command, with its log in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.cluster.local import free_port, is_ready, url
from shared.core import launcher
from shared.core.errors import ConfigError

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
POLL_S = 0.1
SHOWN_LOG_CHARS = 2000


@contextlib.contextmanager
def own_cluster(flags: Sequence[str], log: Path, key: str = "", timeout_s: float = START_TIMEOUT_S) -> Iterator[str]:
    """Yield the cluster's address once all nodes are ready. The cluster ends with the `with` block or with this
    process. Ctrl-C reaches only this process, which then stops the cluster.

    `key`: a key that may see the nodes; needed if `flags` name a key file.
    """
    port = free_port(HOST)
    own = ("--port", str(port), "--admin-without-key", f"--parent-pid={os.getpid()}")
    command = launcher.command("deploy.cli", "up", *own, *flags)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_ready(process, port, num_nodes(flags), log, key, timeout_s)
        yield url(HOST, port)
    finally:
        stop(process)


def num_nodes(flags: Sequence[str]) -> int:
    words = [word for flag in flags for word in flag.split("=", 1)]
    pairs = dict(zip(words, words[1:], strict=False))
    return int(pairs.get("--prefill", "1")) + int(pairs.get("--decode", "1"))


def wait_ready(process: subprocess.Popen[bytes], port: int, nodes: int, log: Path, key: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_ready(HOST, port, nodes, key):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigError(f"the cluster did not start:\n{log.read_text(errors='replace')[-SHOWN_LOG_CHARS:]}")
        time.sleep(POLL_S)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop `baton up`. Wait without a limit, because it kills late processes itself."""
    process.send_signal(signal.SIGTERM)
    process.wait()
