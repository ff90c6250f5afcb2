"""`baton up` with real daemons: ready, restart of a dead node, Ctrl-C, and nobody left behind when it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.machine.patience import HANG_GUARD_S, PATIENT_UP
from tests.support.machine.ports import free_port

BATON = str(Path(sys.executable).with_name("baton"))


class Cluster:
    """A `baton up --model hashlm` in a folder of its own; its log goes to a file."""

    def __init__(self, folder: Path, *flags: str, **options):
        self.port = free_port(2)  # each router has one
        self.log = folder / "log"
        self.folder = folder
        command = [BATON, "up", "--model", "hashlm", "--kv-bytes", "16MiB", "--port", str(self.port)]
        command += [*PATIENT_UP, *flags]
        with self.log.open("wb") as out:
            self.process = psutil.Popen(command, stdout=out, stderr=out, cwd=folder, **options)

    def wait_for(self, done):
        """The suite's hang guard is the bound; a launcher that ends early is an error at once."""
        while not done():
            assert self.process.poll() is None, self.text()
            time.sleep(0.05)

    def text(self):
        return self.log.read_text("utf-8")

    def wait_until_ready(self):
        self.wait_for(lambda: "Baton is ready" in self.text())
        return self

    def ready(self, router=0):
        """Nodes that are ready, by a router's word."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port + router}/ready", timeout=HANG_GUARD_S) as answer:
                return {node["node"] for node in json.load(answer)["nodes"] if node["ready"]}
        except (OSError, urllib.error.URLError):
            return set()

    def child(self, role):
        return next(child for child in self.process.children() if role in child.cmdline())

    def complete(self):
        body = json.dumps(
            {"model": "hashlm", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        ).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:
            return json.load(answer)["usage"]["completion_tokens"]


@contextlib.contextmanager
def running(folder: Path, *flags: str) -> Iterator[Cluster]:
    started = Cluster(folder, *flags)
    family = [started.process]
    try:
        family += started.wait_until_ready().process.children()
        yield started
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        started.process.wait()


@pytest.fixture
def own(tmp_path):
    """A cluster for a test that ends it."""
    with running(tmp_path) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """One for all tests that leave it as it was."""
    with running(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def wait_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=HANG_GUARD_S)
    assert not alive


def test_it_serves_from_any_folder_and_stops_when_asked(own):
    children = own.process.children()
    assert len(children) == 3 and own.ready() == {"prefill-0", "decode-0"}
    assert own.complete() == 5
    own.process.send_signal(signal.SIGTERM)
    assert own.process.wait(HANG_GUARD_S) == 0
    wait_gone(children)
    assert "killed" not in own.text() and "Traceback" not in own.text()
    assert [file.name for file in own.folder.iterdir()] == ["log"]


def test_a_second_up_on_a_used_port_fails_and_disturbs_nothing(cluster):
    command = [BATON, "up", "--model", "hashlm", "--port", str(cluster.port)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"--port {cluster.port}: can't serve" in done.stderr
    assert cluster.complete() == 5


@pytest.mark.parametrize("role", ["decode", "router"])
def test_who_dies_comes_back(cluster, role):
    old = cluster.child(role)
    old.kill()
    cluster.wait_for(lambda: re.search(rf"{role}\S* was killed by SIGKILL; it is started again", cluster.text()))
    cluster.wait_for(lambda: cluster.ready() == {"prefill-0", "decode-0"})
    assert cluster.child(role).pid != old.pid
    assert cluster.complete() == 5


def test_one_of_two_routers_comes_back_and_ctrl_c_ends_both(tmp_path):
    nodes = {"prefill-0", "decode-0"}
    with running(tmp_path, "--routers", "2") as two:
        assert all(f"http://127.0.0.1:{two.port + router}\n" in two.text() for router in range(2))
        assert two.ready(0) == two.ready(1) == nodes
        old = two.child("--router-id=router-1")
        old.kill()
        two.wait_for(lambda: two.ready(1) == nodes)
        assert two.child("--router-id=router-1").pid != old.pid and two.ready(0) == nodes
        children = two.process.children()
        two.process.send_signal(signal.SIGINT)
        assert two.process.wait(HANG_GUARD_S) == 0
        wait_gone(children)


def test_kill_9_of_the_launcher_leaves_nobody(own):
    children = own.process.children()
    own.process.kill()
    wait_gone(children)


def test_each_process_has_its_cores_and_shows_its_role(cluster):
    cores = sorted(os.sched_getaffinity(0))
    expected = {"router": cores[:1], "prefill": cores[: max(1, len(cores) // 2)], "decode": cores[-1:]}
    if len(cores) == 2:
        assert {role: cluster.child(role).cpu_affinity() for role in expected} == expected
    assert all(cluster.child(role).environ().get("PATH") for role in expected)


def test_ctrl_c_in_a_terminal_stops_it_once_and_cleanly(tmp_path):
    """The terminal sends SIGINT to the whole foreground group; only the launcher is in it."""
    controller, terminal = pty.openpty()
    try:
        started = Cluster(tmp_path, stdin=terminal, preexec_fn=lambda: take_terminal(terminal))
        try:
            children = started.wait_until_ready().process.children()
            os.write(controller, b"\x03")
            assert started.process.wait(HANG_GUARD_S) == 0
            wait_gone(children)
            assert "killed" not in started.text() and "Traceback" not in started.text()
        finally:
            if started.process.is_running():
                started.process.kill()
    finally:
        os.close(controller)
        os.close(terminal)


def take_terminal(terminal: int) -> None:
    """In the child: a session of its own whose controlling terminal is this one."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
