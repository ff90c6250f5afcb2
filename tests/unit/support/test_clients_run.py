"""What `make clients` says of a client: its checks, what failed, why it could not be tried. With stand-ins."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.clients import environment, run
from tests.clients.environment import NotInstalled, ensure, run_installer, version_of
from tests.clients.run import Outcome, show, try_client
from tests.clients.served import Served
from tests.clients.table import CLIENTS, Client, Kind
from tests.support.machine.patience import HANG_GUARD_S

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "tests" / "clients"
HEAD = (
    f"import sys; sys.path.insert(0, {str(PROGRAMS)!r})\nfrom tally import from_arguments\ntally = from_arguments()\n"
)
SHELL = Client("sh", "stand_in.py", kind=Kind.ON_PATH)
ABSENT = Client("no-such-client", "stand_in.py", kind=Kind.ON_PATH)


@pytest.fixture
def cluster(tmp_path: Path) -> Served:
    return Served("http://127.0.0.1:1", tmp_path / "tokenizer", tmp_path, "m")


def tried(cluster: Served, monkeypatch: pytest.MonkeyPatch, lines: str, guard_s: float = HANG_GUARD_S) -> Outcome:
    """Try a client whose program has these lines."""
    program = cluster.folder / "stand_in.py"
    program.write_text(HEAD + lines)
    monkeypatch.setattr(run, "command_of", lambda client, folder: [sys.executable, str(program)])
    return try_client(SHELL, cluster.folder / "environment", cluster, guard_s)


def test_a_client_whose_checks_end_well_has_passed(cluster: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = tried(cluster, monkeypatch, "with tally.check('one'): assert tally.api == 'http://127.0.0.1:1/v1'")
    assert (outcome.checks, outcome.verdict) == (("one",), "passed")


def test_a_failed_check_is_told_and_the_next_one_runs(cluster: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = tried(cluster, monkeypatch, "with tally.check('one'):\n    assert 1 == 2\nwith tally.check('two'): pass")
    assert outcome.checks == ("one", "two")
    assert outcome.verdict == "failed: one: AssertionError: assert 1 == 2"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "ended with 0 after 0 checks: it said nothing"),
        ("with tally.check('one'): pass\nsys.exit('broken')", "ended with 1 after 1 checks: broken"),
        ("import no_such_client", "ended with 1 after 0 checks: ModuleNotFoundError"),
    ],
)
def test_a_program_that_breaks_or_checks_nothing_has_failed(
    cluster: Served, monkeypatch: pytest.MonkeyPatch, lines: str, said: str
) -> None:
    assert said in tried(cluster, monkeypatch, lines).verdict


def test_a_program_that_hangs_is_ended_with_its_children(cluster: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = str(cluster.folder / "child")
    child = "import time; time.sleep(3000)"
    lines = f"import subprocess\nsubprocess.run([sys.executable, '-c', {child!r}, {mark!r}])"
    assert tried(cluster, monkeypatch, lines, guard_s=2.0).verdict == "failed: no end within 2 s"
    assert all_end(mark)


def test_what_a_program_leaves_behind_is_ended_too(cluster: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = str(cluster.folder / "child")
    child = "import time; time.sleep(3000)"
    lines = f"import subprocess\nwith tally.check('one'): subprocess.Popen([sys.executable, '-c', {child!r}, {mark!r}])"
    assert tried(cluster, monkeypatch, lines).verdict == "passed"
    assert all_end(mark)


def all_end(word: str) -> bool:
    """Whether all processes that have this argument end. One that is killed takes a moment."""
    _, alive = psutil.wait_procs(list(having(word)), timeout=HANG_GUARD_S)
    return not alive


def having(word: str) -> Iterator[psutil.Process]:
    """Yield the living processes that have this argument."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if word in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def test_a_client_sees_no_setting_of_the_user(cluster: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere")
    lines = "import os\nwith tally.check('one'): assert set(os.environ) & {'OPENAI_BASE_URL', 'HOME'} == {'HOME'}"
    assert tried(cluster, monkeypatch, lines).verdict == "passed"


def test_what_can_not_be_installed_is_told_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(run, "named", lambda name: ABSENT)
    assert run.main(["curl"]) == 0
    assert "not tested: there is no no-such-client on this machine" in " ".join(capsys.readouterr().out.split())


def test_an_installer_that_fails_is_quoted_with_its_last_line() -> None:
    with pytest.raises(NotInstalled, match="^ERROR: no network$"):
        run_installer([sys.executable, "-c", "import sys; sys.exit('Looking\\nERROR: no network\\n')"])
    with pytest.raises(NotInstalled, match="there is no no-such-npm"):
        run_installer(["no-such-npm"])


def test_an_environment_is_remade_when_its_table_line_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(environment, "install_pip", lambda client, folder: made.append(client.packages))
    (tmp_path / "one").mkdir()
    for version in ("1", "1", "2"):
        ensure(Client("one", "stand_in.py", (f"one=={version}",)))
    assert made == [("one==1",), ("one==2",)]


def test_handwritten_requests_need_nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path)
    client = Client("shapes", "stand_in.py", kind=Kind.BY_HAND)
    assert ensure(client).is_dir() and version_of(client) == ""
    assert environment.command_of(client, tmp_path)[0] == sys.executable


def test_a_native_program_needs_a_network_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client = Client("agent", "claude_code.py", ("agent@1.2.3",), Kind.NPM_PROGRAM)
    monkeypatch.setattr(environment, "ENVIRONMENTS", tmp_path / "closed" / "clients")
    monkeypatch.setattr(environment, "why_not_alone", lambda: "only root can")
    with pytest.raises(NotInstalled, match="only root can"):
        ensure(client)
    (tmp_path / "closed").mkdir(mode=0o700)
    monkeypatch.setattr(environment, "why_not_alone", str)
    with pytest.raises(NotInstalled, match=f"nobody may not enter {tmp_path.parents[-2]}"):
        ensure(client)
    assert version_of(client) == "1.2.3" and environment.command_of(client, tmp_path)[-1] == "tests.clients.claude_code"


def test_a_program_runs_by_its_language(tmp_path: Path) -> None:
    heads = {name: environment.command_of(environment.named(name), tmp_path)[:-1] for name in ("java", "go", "curl")}
    assert heads == {"java": ["java"], "go": ["go", "run"], "curl": [sys.executable]}


def test_a_tool_s_version_is_the_first_number_with_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "go"
    tool.write_text('#!/bin/sh\n[ "$1" = version ] && echo "go version go1.19.8 linux/amd64"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert version_of(environment.named("go")) == "1.19.8"


def test_a_program_is_told_of_both_clusters(cluster: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    both = replace(cluster, scripted_url="http://127.0.0.1:2")
    lines = "with tally.check('one'): assert tally.scripted_api == 'http://127.0.0.1:2/v1', tally.scripted_model"
    assert tried(both, monkeypatch, lines).verdict == "passed"


def test_one_failure_is_in_the_table_and_in_the_status(
    cluster: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "served", lambda: contextlib.nullcontext(cluster))
    monkeypatch.setattr(run, "ensure", lambda client: cluster.folder)
    for failures, status in (((), 0), (("stream: no [DONE]",), 1)):
        outcome = Outcome(SHELL, "1.0", ("chat", "stream"), failures)
        monkeypatch.setattr(run, "try_client", lambda *_, outcome=outcome: outcome)
        assert run.main(["curl"]) == status
    shown = capsys.readouterr().out
    assert "passed" in shown and "failed: stream: no [DONE]" in shown and "chat; stream" in shown


def test_every_client_has_a_program_and_a_pinned_version() -> None:
    for client in CLIENTS:
        assert (PROGRAMS / client.program).is_file(), client
        assert client.kind is Kind.ON_PATH or all(char.isdigit() for char in version_of(client).replace(".", ""))
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)


def test_versions_are_those_of_the_constraints() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if "==" in line
    )
    packages = dict(package.split("==") for client in CLIENTS for package in client.packages if "==" in package)
    shared = packages.keys() & pinned.keys()
    assert "openai" in shared
    assert {name: packages[name] for name in shared} == {name: pinned[name] for name in shared}


def test_brackets_of_an_error_are_no_markup() -> None:
    sink = io.StringIO()
    show([Outcome(SHELL, "1", ("one",), ("one: messages[0] is [bold]",))], Console(file=sink, width=160))
    assert "messages[0] is [bold]" in sink.getvalue()
