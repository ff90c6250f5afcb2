"""The contract for streams: the reference server keeps it, and each broken server goes red at the rule it breaks."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stream_conformance.apis import APIS
from stream_conformance.client import Asker
from stream_conformance.command import main
from stream_conformance.reference import Reference
from stream_conformance.rules import RULES, judge, name_of
from stream_conformance.run import Options, Run
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web import broken_streams as broken
from tests.support.web.broken_streams import serving

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / "conformance"
KEY = "sesame"
Servers = Callable[[], Sequence[Reference]]


def one(kind: type[Reference]) -> Servers:
    return lambda: [kind()]


# By the rule that the servers break.
BROKEN: list[tuple[str, Servers]] = [
    ("every event has an id", one(broken.WithoutAnId)),
    ("every event has an id", one(broken.IdsOfOtherLetters)),
    ("ids only when asked", one(broken.IdsForAll)),
    ("rest is exact", one(broken.Repeats)),
    ("rest is exact", one(broken.Skips)),
    ("rest is exact", one(broken.EndsOtherwise)),
    ("first id has the token", one(broken.TokenOnlyOnce)),
    ("numbers rise by one", one(broken.CountsByTwo)),
    ("drawn seeds are kept", one(broken.DrawsAnew)),
    ("broken streams continue", one(broken.ForgetsBroken)),
    ("open streams continue", one(broken.OneConnection)),
    ("continuations continue", one(broken.ContinuesOnce)),
    ("a place serves twice", one(broken.ServesOnce)),
    ("nothing follows the end", one(broken.EndsAgain)),
    ("the answer keeps its id", one(broken.RenamesAnswers)),
    ("usage counts the whole answer", one(broken.CountsTheRest)),
    ("bodies are compared by meaning", one(broken.ComparesBytes)),
    ("another body is refused", one(broken.TakesAnyBody)),
    ("another body is refused", one(broken.AsksForAgain)),
    ("another body is refused", one(broken.RefusesOtherwise)),
    ("other tokens are refused", lambda: [broken.BeginsAnew(has_slash=True)]),
    ("malformed ids are refused", lambda: [broken.BeginsAnew(has_slash=False)]),
    ("other places are refused", one(broken.TakesAnyPlace)),
    ("continuing needs the key", lambda: [broken.NeedsNoKey(key=KEY)]),
    ("other servers continue", lambda: [Reference("a"), Reference("b")]),
    ("kept answers are the first ones", one(broken.KeepsOthers)),
    ("kept answers are the first ones", one(broken.KeepsSilently)),
    ("kept keys have one body", one(broken.KeysForAllBodies)),
]
BY_HOOK = "faults lose nothing"


def results(urls: list[str], api: str = "chat", hook: str = "", key: str = "") -> dict[str, str]:
    options = Options(has_key=bool(key), hook=hook, patience_s=HANG_GUARD_S)
    run = Run(Asker(urls, APIS[api].path, key, HANG_GUARD_S), APIS[api], options)
    return {verdict.rule: verdict.result for verdict in judge(run)}


@pytest.mark.parametrize(("rule", "servers"), BROKEN)
def test_a_broken_server_fails_the_rule_it_breaks(rule: str, servers: Servers) -> None:
    made = servers()
    with serving(*made) as urls:
        found = results(urls, key=made[0].key)
    assert [name for name, result in found.items() if result == "fail"] == [rule]


def test_every_rule_has_a_broken_server() -> None:
    assert {rule for rule, _ in BROKEN} | {BY_HOOK} == set(map(name_of, RULES))


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_the_reference_passes_every_rule(api: str) -> None:
    with serving(*(Reference("secret", KEY) for _ in range(2))) as urls:
        found = results(urls, api, hook="true", key=KEY)
    assert set(found.values()) == {"pass"} and len(found) == len(RULES)


def test_a_server_without_ids_offers_nothing() -> None:
    """This is no failure: it never promised anything."""

    class Plain(Reference):
        def wants_ids(self, headers: dict[str, str]) -> bool:
            return False

        def whole(self, path: str, raw: bytes, headers: dict[str, str]) -> tuple[bytes, str]:
            return super().whole(path, raw, {})

    with serving(Plain()) as urls:
        assert set(results(urls).values()) == {"not offered"}
        assert main(urls) == 3


def test_a_cache_of_answers_promises_nothing() -> None:
    """It gives the same bytes without an Idempotency-Key, too."""
    kept = b'{"id": "chatcmpl-7", "choices": []}'

    class Cached(Reference):
        def whole(self, path: str, raw: bytes, headers: dict[str, str]) -> tuple[bytes, str]:
            return kept, ""

    with serving(Cached()) as urls:
        found = results(urls)
    assert found["kept answers are the first ones"] == found["kept keys have one body"] == "not offered"
    assert "fail" not in found.values()


@pytest.mark.parametrize(
    ("kind", "rule"),
    [(broken.LimitsAnswers, "broken streams continue"), (broken.WritesNoJson, "rest is exact")],
)
def test_what_a_server_does_wrong_ends_no_program(
    kind: type[Reference], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(kind()) as urls:
        assert main(urls) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(rule) and " fail " in line]


def test_the_command_s_status_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Reference(key=KEY)) as urls:
        assert main([*urls, "--key", KEY]) == 0
        assert "no --fault-hook" in capsys.readouterr().out
        assert main(urls) == 2
        assert "no stream: status 401" in capsys.readouterr().err
    with serving(broken.Skips()) as urls:
        assert main(urls) == 1
        assert "rest is exact                    fail         after event 1:" in capsys.readouterr().out
    assert main(["http://127.0.0.1:1"]) == 2


@contextlib.contextmanager
def restarted(*flags: str) -> Iterator[tuple[str, str]]:
    """Give the URL of a server that is started again whenever it ends, and a command that kills it."""
    ended, process, port = threading.Event(), start(0, *flags), 0
    url = read_url(process)
    port = int(url.rpartition(":")[2])
    pid_file = Path(f"/proc/{process.pid}")
    assert pid_file.exists()
    processes = [process]

    def watch() -> None:
        while not ended.is_set():
            processes[-1].wait()
            if not ended.is_set():
                processes.append(start(port, *flags))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield url, f"kill -9 {process.pid}"
    finally:
        ended.set()
        processes[-1].kill()
        thread.join(HANG_GUARD_S)
        for one_process in processes:
            one_process.wait()
            assert one_process.stdout is not None
            one_process.stdout.close()


def start(port: int, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stream_conformance.serve", "--port", str(port), "--pace-s", "0.001", *flags]
    return subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, text=True)


def read_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(("flags", "result"), [(("--secret", "s"), "pass"), ((), "fail")])
def test_a_killed_server_that_comes_back(flags: tuple[str, ...], result: str) -> None:
    """Without a secret of its own it knows nothing of its streams when it is back."""
    with restarted(*flags) as (url, hook):
        found = results([url], hook=hook)
    assert found.pop(BY_HOOK) == result
    assert set(found.values()) == {"pass", "not tested"}


def test_the_package_stands_alone() -> None:
    """It imports nothing of Baton, and only the clients that resume need a library. Baton's wheel has none of it."""
    allowed = {*sys.stdlib_module_names, "stream_conformance"}
    found = {file.stem: imports_of(file) - allowed for file in (HOME / "stream_conformance").glob("*.py")}
    assert {stem: names for stem, names in found.items() if names} == {"resume": {"httpx2"}}
    assert len((HOME / "stream_conformance" / "reference.py").read_text("utf-8").splitlines()) <= 150
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    assert not [name for name in packages if "conformance" in name]


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found
