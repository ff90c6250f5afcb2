"""A hang-up ends each process in order, as SIGTERM does; under nohup it ends none."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shared.config.core_plan import CorePlan
from shared.core.stop_signals import stop_signals
from shared.node.loop.daemon import Daemon
from shared.observe.log import Logger
from shared.ranks.leader import rank_argv
from shared.wire.peers import Inbound
from tests.support.cores.core_rig import CoreKnobs
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.node_pair import make_node
from tests.unit.shared.node.test_node_rounds import Line


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["plain", "nohup"])
def ignores(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = signal.signal(signal.SIGHUP, request.param)
    yield request.param is signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)


def test_nohup_takes_the_hang_up_away_and_nothing_else(ignores: bool) -> None:
    assert set(stop_signals()) == {signal.SIGINT, signal.SIGTERM} | (set() if ignores else {signal.SIGHUP})


def test_a_hang_up_drains_a_node(ignores: bool) -> None:
    signals = [signal.SIGHUP, signal.SIGTERM] if ignores else [signal.SIGHUP]
    counts: list[int] = []

    class Hanging(Line):
        def poll(self, timeout_s: float) -> Sequence[Inbound]:
            counts.append(daemon._signals)
            if signals:
                os.kill(os.getpid(), signals.pop(0))
            return super().poll(timeout_s)

    log = io.StringIO()
    daemon = Daemon(make_node("decode", "d0", CoreKnobs()), Hanging([], []), Logger("d", log), drain_s=0.0)
    assert daemon.run() == 0 and "draining" in log.getvalue()
    assert counts[:2] == ([0, 0] if ignores else [0, 1])


def test_a_node_s_rank_ignores_them_all(ignores: bool) -> None:
    """Rank 0 hears them, and drains before its ranks end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = rank_argv("d0", 1, theirs.fileno(), CorePlan(), "text")
        rank = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
        until, status = time.monotonic() + HANG_GUARD_S, Path(f"/proc/{rank.pid}/status")
        wanted = sum(1 << number - 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        while (found := ignored(status)) & wanted != wanted and time.monotonic() < until:
            time.sleep(0.05)
        ours.close()
        assert found & wanted == wanted and rank.wait(HANG_GUARD_S) == 0


def ignored(status: Path) -> int:
    return int(status.read_text().partition("SigIgn:")[2].split()[0], 16)
