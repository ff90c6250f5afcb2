"""Run `baton up` as a child of another command, with its log in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.cluster.ports import free_port
from deploy.cluster.ready import READY, url
from shared.core import launcher
from shared.core.errors import ConfigError

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
POLL_S = 0.1
SHOWN_LOG_CHARS = 2000


@contextlib.contextmanager
def own_cluster(flags: Sequence[str], log: Path, timeout_s: float = START_TIMEOUT_S) -> Iterator[str]:
    """Yield the cluster's address once all nodes are ready. The cluster ends with the `with` block or with this
    process. Ctrl-C reaches only this process, which then stops the cluster.
    """
    port = free_port(HOST)
    own = ("--port", str(port), "--admin-without-key", f"--parent-pid={os.getpid()}")
    command = launcher.command("deploy.cli", "up", *own, *flags)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_ready(process, log, timeout_s)
        yield url(HOST, port)
    finally:
        stop(process)


def wait_ready(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Wait for the announcement: only `baton up` knows how many nodes it starts."""
    deadline = time.monotonic() + timeout_s
    while READY not in (said := log.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigError(f"the cluster did not start:\n{said[-SHOWN_LOG_CHARS:]}")
        time.sleep(POLL_S)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop `baton up`. Wait without a limit, because it kills late processes itself."""
    process.send_signal(signal.SIGTERM)
    process.wait()
