"""The supervisor with small real processes: logs, restarts, order of stopping, nobody left behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from deploy.cluster.child import ChildSpec, describe_end, likely_cause
from deploy.cluster.restart_policy import LONGEST_DELAY_S, WINDOW_S, RestartPolicy
from deploy.cluster.supervisor import Readiness, Supervisor
from shared.core.exit_codes import EXIT_CONFIG
from shared.observe.log import Logger
from tests.support.machine.patience import HANG_GUARD_S

OBEDIENT = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); "
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
SLEEP = "\nimport time\nwhile True: time.sleep(0.05)"  # not pause(): a signal just before it would wake nobody


def child(name, code, vital=False, stop_s=0.0):
    return ChildSpec(name, (sys.executable, "-I", "-S", "-c", code), vital, stop_s)


class Run:
    """One supervisor run: the condition for readiness, what to do then, and all lines it wrote."""

    def __init__(self, *specs, ready=None, when_ready=None, **options):
        self.lines = []
        self.log = io.StringIO()
        self.announced = 0
        self._when_ready = when_ready or (lambda run: os.kill(os.getpid(), signal.SIGTERM))
        ready = ready or (lambda run: len([line for line in run.lines if line.endswith("up")]) >= len(specs))
        settings = {"max_restarts": 3, "stop_timeout_s": HANG_GUARD_S} | options
        self.supervisor = Supervisor(
            specs,
            Readiness(lambda: ready(self), self._announce, settings.pop("start_timeout_s", HANG_GUARD_S)),
            Logger("up", self.log),
            write_line=self.lines.append,
            **settings,
        )
        self.status = self.supervisor.run()

    def _announce(self):
        self.announced += 1
        self._when_ready(self)

    def pid(self, name):
        return next(child.pid for child in self.supervisor.children if child.spec.name == name)


def test_ready_is_announced_once_and_a_signal_ends_it_with_zero():
    run = Run(child("router", OBEDIENT + SLEEP, vital=True), child("decode-0", OBEDIENT + SLEEP))
    assert (run.status, run.announced) == (0, 1)
    assert sorted(run.lines) == ["decode-0 | up", "router | up"]
    assert "killed" not in run.log.getvalue()


def test_the_router_stops_before_the_nodes():
    # os.write: the signal may come while `up` is still being printed, and print can't be entered twice
    late = "import os, signal, sys, time\ndef stop(*_):\n  time.sleep(0.3); os.write(1, b'bye\\n'); sys.exit(0)\n"
    late += "signal.signal(signal.SIGTERM, stop); print('up', flush=True)"
    run = Run(child("router", late + SLEEP, vital=True), child("node", late.replace("0.3", "0") + SLEEP))
    assert [line for line in run.lines if "bye" in line] == ["router | bye", "node | bye"]


@pytest.mark.parametrize("vital", [True, False])
def test_who_may_finish_requests_is_not_killed_meanwhile(vital):
    late = "import os, signal, sys, time\ndef stop(*_):\n  time.sleep(1.0); os.write(1, b'bye\\n'); sys.exit(0)\n"
    late += "signal.signal(signal.SIGTERM, stop); print('up', flush=True)"
    run = Run(child("late", late + SLEEP, vital, stop_s=HANG_GUARD_S), stop_timeout_s=0.1)
    assert "late | bye" in run.lines and "killed" not in run.log.getvalue()


def test_a_second_signal_stops_at_once():
    def twice(run):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    run = Run(child("node", STUBBORN + SLEEP), when_ready=twice, stop_timeout_s=3600.0)
    assert "node did not stop; killed" in run.log.getvalue()


def test_a_node_that_dies_is_started_again():
    pids = []

    def again(run):
        pids.append(run.pid("node"))
        if len(pids) == 1:
            os.kill(pids[0], signal.SIGKILL)
            run.supervisor._ready = False  # so that readiness is announced a second time
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def up_as_often_as_started(run):
        return len([line for line in run.lines if line == "node | up"]) == len(pids) + 1

    run = Run(child("node", OBEDIENT + SLEEP), ready=up_as_often_as_started, when_ready=again)
    assert run.status == 0 and len(set(pids)) == 2
    assert "node was killed by SIGKILL; it is started again in_s=0.5 likely=" in run.log.getvalue()
    assert "memory ran out" in run.log.getvalue()


def test_a_router_that_can_not_start_ends_all_of_it():
    run = Run(child("router", "raise SystemExit(1)", vital=True), child("node", OBEDIENT + SLEEP))
    assert (run.status, run.announced) == (1, 0)
    assert "router ended with status 1 and stays down; stopping" in run.log.getvalue()


def test_a_simultaneous_node_death_does_not_hide_the_router_s():
    specs = (child("router", "", vital=True), child("a", ""), child("b", ""))
    supervisor = Supervisor(
        specs,
        Readiness(bool, bool, 1.0),
        Logger("up", io.StringIO()),
        max_restarts=0,
        stop_timeout_s=1.0,
        write_line=print,
    )
    supervisor._ready = True
    for one in supervisor.children[:2]:
        supervisor._after_death(one, EXIT_CONFIG, now=0.0)
    assert supervisor._failed


def test_one_of_two_routers_may_stay_down():
    specs = (child("router-0", "", vital=True), child("router-1", "", vital=True), child("a", ""), child("b", ""))
    parts = (Readiness(bool, bool, 1.0), Logger("up", io.StringIO()))
    supervisor = Supervisor(specs, *parts, max_restarts=0, stop_timeout_s=1.0, write_line=print)
    supervisor._ready = True
    supervisor._after_death(supervisor.children[0], EXIT_CONFIG, now=0.0)
    assert not supervisor._failed
    supervisor._after_death(supervisor.children[2], EXIT_CONFIG, now=0.0)
    assert not supervisor._failed, "a node is left, and a router"
    supervisor._after_death(supervisor.children[1], EXIT_CONFIG, now=0.0)
    assert supervisor._failed


def test_not_ready_in_time_is_a_failure():
    run = Run(child("node", OBEDIENT + SLEEP), ready=lambda run: False, start_timeout_s=0.0)
    assert run.status == 1 and "not ready in time (a slow disk? see --start-timeout-s)" in run.log.getvalue()


def test_an_error_in_the_supervisor_leaves_no_child():
    pids = []

    def broken(run):
        pids.append(run.pid("node"))
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Run(child("node", STUBBORN + SLEEP), when_ready=broken)
    assert not psutil.pid_exists(pids[0])


def test_lines_of_json_stay_json_and_others_become_it():
    own = '{"time":"t","level":"info","part":"node","message":"up"}'
    rank = own.replace("node", "node.1")
    code = f"import sys; sys.stderr.write({own!r} + chr(10) + {rank!r} + chr(10) + 'a \"fault\"')"
    run = Run(replace(child("node", code), log_form="json"), max_restarts=0, ready=lambda run: False)
    *logged, other = run.lines
    assert logged == [own, rank]
    assert json.loads(other) | {"time": "t"} == json.loads(own) | {"message": 'a "fault"'}


def test_last_words_are_passed_on_and_named():
    code = "import sys; sys.stderr.write('2026 INFO node said so itself\\nTraceback...\\nno newline')"
    run = Run(child("node", code), max_restarts=0, ready=lambda run: False)
    assert run.lines == ["2026 INFO node said so itself", "node | Traceback...", "node | no newline"]


def test_delays_double_and_a_quiet_minute_forgives():
    policy = RestartPolicy(max_restarts=8)
    assert [policy.delay_after_death(float(i), -9) for i in range(7)] == [
        0.5,
        1,
        2,
        4,
        8,
        LONGEST_DELAY_S,
        LONGEST_DELAY_S,
    ]
    assert policy.delay_after_death(7 + WINDOW_S, -9) == 0.5


def test_too_many_deaths_are_final():
    policy = RestartPolicy(max_restarts=2)
    assert [policy.delay_after_death(0.0, 1) for _ in range(3)] == [0.5, 1.0, None]
    assert RestartPolicy(max_restarts=9).delay_after_death(0.0, EXIT_CONFIG) is None


@pytest.mark.parametrize(
    ("status", "text"), [(0, "ended with status 0"), (-9, "was killed by SIGKILL"), (-60, "was killed by signal 60")]
)
def test_ends_in_words(status, text):
    assert describe_end(status) == text


@pytest.mark.parametrize(("status", "words"), [(-9, "memory ran out"), (-7, "was cut off"), (1, ""), (-15, "")])
def test_an_end_that_says_too_little_has_a_likely_cause(status, words):
    assert words in likely_cause(status).get("likely", "") and bool(likely_cause(status)) == bool(words)


PARENT = """
import os, subprocess, sys
code = (
    "import sys, time; from shared.core.orphan_guard import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "print('guarded', flush=True); time.sleep(600)"
)
child = subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_kill_9_of_the_parent_takes_the_child_along():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
    while not gone(pid):  # the suite's hang guard is the bound
        time.sleep(0.02)


def test_a_child_whose_parent_is_gone_already_ends_itself():
    code = "from shared.core.orphan_guard import die_with_parent; die_with_parent(1); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("ignored", [False, True], ids=["plain", "nohup"])
def test_a_hang_up_ends_the_whole_cluster(ignored):
    def hang_up(run):
        os.kill(os.getpid(), signal.SIGHUP)
        assert run.supervisor._stop_requests == (0 if ignored else 1)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert Run(child("node", OBEDIENT + SLEEP), when_ready=hang_up).status == 0
    finally:
        signal.signal(signal.SIGHUP, before)
