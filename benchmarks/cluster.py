"""`baton up` as a child process for a measurement: started on a free port, ready when this returns, stopped with it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READY_TIMEOUT_S = 900.0  # kernels that no cache has are compiled before


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def baton_up(*flags: str, code: Path = ROOT) -> Iterator[int]:
    """Yields the HTTP port. `code`: the checkout that runs."""
    port = free_port()
    own = ("--port", str(port), "--start-timeout-s", str(READY_TIMEOUT_S), "--sampling-defaults", "neutral")
    command = [sys.executable, "-P", str(code / "shared/core/launcher.py"), "deploy.cli", "up", *own, *flags]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_ready(port, process, Path(log.name))
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as reply:
            if reply.status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"baton up did not get ready:\n{log.read_text()[-4000:]}")
