"""The keeper of one daemon, with real children, and what `baton ray` can say without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deploy import cli
from deploy.cluster.child import ChildSpec
from deploy.ray import own_ray as head
from deploy.ray.keeper import Keeper
from deploy.ray.own_ray import RayRecord
from deploy.ray.report import DRAINED, FAILED, IDLE, RUNNING, STOPPED
from shared.config.processes import RayClusterConfig
from shared.core.exit_codes import EXIT_CONFIG, EXIT_DRAINED
from tests.support.machine.patience import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[4]


def python(code: str) -> ChildSpec:
    return ChildSpec("child", (sys.executable, "-I", "-S", "-c", textwrap.dedent(code)))


def until(condition: Callable[[], bool]) -> None:
    while not condition():  # the suite's hang guard is the bound
        time.sleep(0.01)


@pytest.fixture
def deaths() -> list[int]:
    return []


@pytest.fixture
def keeper(deaths: list[int]) -> Keeper:
    return Keeper(lambda line: None, deaths.append, stop_timeout_s=HANG_GUARD_S)


WAITS = "import signal, sys, time; print('up', flush=True)\nwhile True: time.sleep(1)"
ENDS_WELL = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True)\n" + (
    "while True: time.sleep(1)"
)


def test_a_daemon_is_started_once_and_stopped_when_asked(keeper, deaths):
    assert keeper.state == IDLE
    keeper.start(python(ENDS_WELL))
    until(lambda: "up" in keeper.words)
    pid = keeper.pid
    keeper.start(python(ENDS_WELL))
    assert keeper.state == RUNNING and keeper.pid == pid
    keeper.stop()
    until(lambda: keeper.state == STOPPED)
    assert deaths == [] and not psutil.pid_exists(pid)
    keeper.start(python(ENDS_WELL))
    until(lambda: keeper.state == RUNNING and keeper.pid not in (0, pid))
    keeper.stop()
    until(lambda: keeper.state == STOPPED)


def test_what_was_never_started_is_stopped_at_once(keeper):
    keeper.stop()
    assert keeper.state == STOPPED


def test_a_daemon_that_does_not_end_is_killed(deaths):
    keeper = Keeper(lambda line: None, deaths.append, stop_timeout_s=0.2)
    keeper.start(python("import signal; signal.signal(15, signal.SIG_IGN)\n" + WAITS))
    until(lambda: "up" in keeper.words)
    keeper.stop()
    until(lambda: keeper.state == STOPPED)
    assert deaths == []


@pytest.mark.parametrize(
    ("code", "state", "told"),
    [
        ("raise SystemExit(3)", STOPPED, [3]),
        ("import os; os.kill(os.getpid(), 9)", STOPPED, [-signal.SIGKILL]),
        (f"print('no such model'); raise SystemExit({EXIT_CONFIG})", FAILED, []),
        (f"raise SystemExit({EXIT_DRAINED})", DRAINED, []),
    ],
)
def test_how_a_daemon_ended_decides_what_becomes_of_its_actor(keeper, deaths, code, state, told):
    keeper.start(python(code))
    until(lambda: keeper.state == state and deaths == told)
    assert ("no such model" in keeper.words) is (state == FAILED)
    if state in (FAILED, DRAINED):
        keeper.start(python(ENDS_WELL))
        assert keeper.state == state, "it stays down"


def test_a_daemon_ends_with_the_process_that_keeps_it(tmp_path):
    """Though the call that asked for it came from a thread that is gone: the kernel's guard is the forking thread's."""
    code = """
        import os, sys, threading, time
        from deploy.cluster.child import ChildSpec
        from deploy.ray.keeper import Keeper
        keeper = Keeper(lambda line: None, print, 5.0)  # its thread's prints would mix with the one below
        child = "from shared.core.orphan_guard import die_with_parent; import time;" \\
            f"die_with_parent({os.getpid()}); print('guarded', flush=True); time.sleep(600)"
        spec = ChildSpec("child", (sys.executable, "-c", child))
        caller = threading.Thread(target=keeper.start, args=(spec,))
        caller.start(); caller.join()
        while "guarded" not in keeper.words: time.sleep(0.01)
        print("pid", keeper.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        line = next(line for line in process.stdout if line.startswith("pid"))
        child = psutil.Process(int(line.split()[1]))
        time.sleep(0.3)
        assert child.is_running(), "it does not end with the thread that asked for it"
        process.kill()
        child.wait(HANG_GUARD_S)


NO_SUCH_PROGRAM = 'ChildSpec("child", ("/no/such/program",))'
SPEAKS = 'ChildSpec("child", (sys.executable, "-I", "-S", "-c", "print(1, flush=True); import time; time.sleep(600)"))'


@pytest.mark.parametrize(("spec", "words"), [(NO_SUCH_PROGRAM, "/no/such/program"), (SPEAKS, "line can't be written")])
def test_a_keeper_that_fails_ends_its_process(spec, words):
    """An actor without its thread would say forever that its daemon runs. Ray sees that a process has ended."""
    code = f"""
        import sys, threading
        from deploy.cluster.child import ChildSpec
        from deploy.ray.keeper import Keeper
        def write(line): raise ValueError("line can't be written")
        Keeper(write, print, 5.0).start({spec})
        threading.Event().wait()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD_S)
    assert done.returncode == 1 and words in done.stderr


def test_an_actor_whose_log_is_full_keeps_its_daemon_and_can_end():
    actors = pytest.importorskip("deploy.ray.actors", reason="Ray is not installed")
    code = "import sys; from deploy.ray import actors; actors.log('a line'); actors.end_actor('of a test')"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_GUARD_S
        )
    assert actors and done.returncode == 1 and "Traceback" not in done.stderr


# ---- the command without a cluster


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_the_record_tells_a_process_from_a_later_one_of_its_pid(home):
    record = head.record_of("127.0.0.1:1", "baton", os.getpid())
    head.write_record(record)
    assert head.read_record() == record and record.head == psutil.Process()
    assert replace(record, head_born=record.head_born - 1).head is None and RayRecord("a", "b").head is None
    head.forget_record()
    assert head.read_record() is None
    head.record_path().write_text("[1]")
    assert head.read_record() is None


def test_a_cluster_begins_only_where_its_record_can_be_kept(home, monkeypatch):
    assert head.own_folder() == home / ".baton"
    monkeypatch.setattr(head, "can_write", lambda path: False)
    with pytest.raises(cli.ConfigError, match=r"\.baton can't be written; set HOME"):
        head.own_folder()
    (home / ".baton").rmdir()
    (home / ".baton").touch()
    with pytest.raises(cli.ConfigError, match=r"\.baton: File exists; set HOME"):
        head.own_folder()


@pytest.mark.skipif(not head.BOOT_ID.exists(), reason="this system has no ids of boots")
def test_a_stepped_clock_hides_no_running_ray_but_a_boot_does(monkeypatch):
    record = head.record_of("127.0.0.1:1", "baton", os.getpid())
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 12.0)
    assert record.head is not None
    assert replace(record, head_boot="another").head is None


def test_without_boot_ids_the_time_of_birth_counts(monkeypatch, tmp_path):
    born = psutil.Process().create_time()
    monkeypatch.setattr(head, "BOOT_ID", tmp_path / "none")
    record = head.record_of("127.0.0.1:1", "baton", os.getpid())
    assert record == RayRecord("127.0.0.1:1", "baton", os.getpid(), born)
    assert replace(record, head_born=born + 1).head is not None
    assert replace(record, head_born=born + 60).head is None


@pytest.mark.parametrize("word", ["status", "down"])
def test_without_a_file_the_last_cluster_is_meant_and_must_exist(home, capsys, word):
    pytest.importorskip("ray", reason="Ray is not installed")
    assert cli.main(["ray", word]) == 2
    assert "no cluster was started from here" in capsys.readouterr().err


def test_a_missing_ray_is_said(home, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["ray", "status"]) == 2
    assert "pip install" in (said := capsys.readouterr().err) and "[ray]" in said


@pytest.fixture
def sleeper(monkeypatch):
    """In Ray's place a process that sleeps is started."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options) -> subprocess.Popen[bytes]:
        started.append(popen(["sleep", "600"], **options))
        return started[0]

    monkeypatch.setattr(head.subprocess, "Popen", start)
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("before", [None, RayRecord("10.0.0.1:6379", "elsewhere")])
def test_ctrl_c_while_ray_starts_leaves_no_ray(home, monkeypatch, sleeper, before):
    def interrupted(process: subprocess.Popen[bytes], log: Path) -> None:
        raise KeyboardInterrupt

    if before is not None:
        head.write_record(before)
    monkeypatch.setattr(head, "wait_for_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        head.start("baton", 1.0)
    assert not psutil.pid_exists(sleeper[0].pid) and head.read_record() == before


def test_a_ray_that_still_starts_is_on_record(home, monkeypatch, sleeper):
    found: list[RayRecord | None] = []
    monkeypatch.setattr(head, "wait_for_start", lambda process, log: found.append(head.read_record()))
    assert found == [] and [head.start("baton", 1.0)] == found and found[0].head.pid == sleeper[0].pid


def test_down_stops_a_ray_that_does_not_answer(home, monkeypatch, sleeper):
    session = pytest.importorskip("deploy.ray.session", reason="Ray is not installed")
    monkeypatch.setattr(head, "wait_for_start", lambda process, log: None)

    def silent(*args: object) -> None:
        raise cli.ConfigError("no Ray cluster")

    monkeypatch.setattr(session, "connected", silent)
    assert session.down(head.start("baton", 1.0)) == 0
    assert not psutil.pid_exists(sleeper[0].pid) and head.read_record() is None
    with pytest.raises(cli.ConfigError, match="no Ray cluster"):
        session.down(RayRecord("10.0.0.1:6379", "elsewhere"))


def test_a_second_up_at_the_same_moment_leaves_the_first_alone(monkeypatch):
    """Both saw no manager; Ray makes one of them."""
    session = pytest.importorskip("deploy.ray.session", reason="Ray is not installed")
    from ray.exceptions import ActorAlreadyExistsError

    def taken(config: RayClusterConfig) -> None:
        assert config.share.prefill_gpus == config.share.decode_gpus == 1.0, "Ray has two GPUs"
        raise ActorAlreadyExistsError("manager")

    monkeypatch.setattr(session, "find_manager", lambda: None)
    machine = {"NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "GPU": 2.0}}
    monkeypatch.setattr(session, "alive_machines", lambda: [machine])
    monkeypatch.setattr(session.ray, "cluster_resources", lambda: machine["Resources"])
    monkeypatch.setattr(session, "check_installations", lambda *args: None)
    monkeypatch.setattr(session, "make_manager", taken)
    downs: list[str] = []
    monkeypatch.setattr(session, "take_down", lambda: downs.append("down"))
    with pytest.raises(cli.ConfigError, match="'baton' runs already"):
        session.launch(RayClusterConfig(), RayRecord("10.0.0.1:6379", "baton"))
    assert downs == []


def test_what_is_shipped_is_our_packages_alone(tmp_path):
    session = pytest.importorskip("deploy.ray.session", reason="Ray is not installed")
    excluded = session.shipped(ROOT)["excludes"]
    assert {"/tests", "/README.md"} <= set(excluded)
    assert not {f"/{package}" for package in session.OURS} & set(excluded)
    with pytest.raises(cli.ConfigError, match="not a checkout of Baton"):
        session.shipped(tmp_path)
