"""A foreign program alone: an empty environment, a home of its own, and a network that has only loopback.

The program runs as `nobody` in a network namespace. What this process listens to there is all that the program can
reach. The home is removed at the end, and what the program started ends with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.drill.namespaces import Namespace, ip, ip_tool
from tests.drill.needs import why_not_here

NOBODY = 65534
NO_TOOL = "there is no `ip` (iproute2) on this machine"
BLOCK = 65536  # bytes that a relay reads at once


@dataclass(frozen=True, slots=True)
class Done:
    """How a program ended. `printed` went to its output, `warned` to its errors."""

    status: int
    printed: str
    warned: str


@dataclass(frozen=True, slots=True)
class Alone:
    """`home`: the program's own folder; `work`: the empty folder in it where the program starts."""

    namespace: Namespace
    home: Path

    @property
    def work(self) -> Path:
        return self.home / "work"

    def listen(self) -> socket.socket:
        """Return a socket that listens inside the namespace. The caller closes it."""
        return self.namespace.do(socket.create_server, ("127.0.0.1", 0))

    def write(self, path: str, text: str) -> None:
        """Write a file of the home, that the program may change."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        give_to_nobody(self.home)

    def run(self, command: Sequence[str | Path], settings: Mapping[str, str], guard_s: float) -> Done:
        """Return how the program ended, and what it printed. Raise TimeoutExpired when it does not end."""
        return self.namespace.do(self._run, [str(word) for word in command], settings, guard_s)

    def _run(self, command: Sequence[str], settings: Mapping[str, str], guard_s: float) -> Done:
        with subprocess.Popen(
            command,
            cwd=self.work,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(self.home), **settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            start_new_session=True,
        ) as program:
            try:
                printed, warned = program.communicate(timeout=guard_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
        return Done(program.returncode, printed.decode(errors="replace"), warned.decode(errors="replace"))


@contextlib.contextmanager
def alone() -> Iterator[Alone]:
    """Make the namespace and the home, where `why_not_alone` says nothing against it."""
    namespace = Namespace()
    home = Path(tempfile.mkdtemp(prefix="alone-", dir="/tmp"))
    try:
        namespace.do(ip, "link set lo up")
        (home / "work").mkdir()
        give_to_nobody(home)
        yield Alone(namespace, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
        namespace.close()


def why_not_alone() -> str:
    """Return why this user can run no program alone on this system; "" when it can."""
    return why_not_here() or (NO_TOOL if ip_tool() is None else "") or ("only root can" if os.geteuid() else "")


def give_to_nobody(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


@contextlib.contextmanager
def relayed(listener: socket.socket, host: str, port: int) -> Iterator[None]:
    """Pass each connection to a server of this process's own network, byte for byte, until the block ends."""

    def accept() -> None:
        with contextlib.suppress(OSError):  # the listener is shut
            while True:
                inner, _ = listener.accept()
                threading.Thread(target=join, args=(inner, host, port), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def join(inner: socket.socket, host: str, port: int) -> None:
    """Pass bytes both ways until both sides have ended."""
    with inner, socket.create_connection((host, port)) as outer:
        back = threading.Thread(target=pass_on, args=(outer, inner), daemon=True)
        back.start()
        pass_on(inner, outer)
        back.join()


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(BLOCK):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
