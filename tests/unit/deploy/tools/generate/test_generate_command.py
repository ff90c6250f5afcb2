"""`baton generate` against a server that does as it is told: answers, refusals, retries, stops, and going on."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy import cli
from deploy.router_url import parse_url
from deploy.tools.generate import batch
from deploy.tools.generate.asker import Backoff, BatchClient, RetryLimits
from deploy.tools.generate.batch import run_all
from deploy.tools.generate.http_client import HttpAnswer
from deploy.tools.generate.line_file import BatchStopped, OutputLine, ResponsePart
from deploy.tools.generate.lines import BatchRequest
from tests.support.clusters.key_folders import write_key
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.batch_server import BatchServer, batch_server

ROOT = Path(__file__).resolve().parents[5]
# a background job of a shell ignores Ctrl-C, and so do its children: this one hears it again
HEARS_CTRL_C = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from deploy import cli; "
HEARS_CTRL_C += "sys.exit(cli.main(sys.argv[1:]))"


@pytest.fixture
def server() -> Iterator[BatchServer]:
    with batch_server() as server:
        yield server


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Backoff(first_s=0.001, longest_s=0.002)
    monkeypatch.setattr(batch, "RetryLimits", lambda retries, timeout_s: RetryLimits(retries, timeout_s, quick))


def request(name: str, prompt: str, url: str = "/v1/completions") -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": prompt}]} if "chat" in url else {"prompt": prompt}
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **asked}}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def read(path: Path) -> dict[str | None, dict[str, Any]]:
    return {line["custom_id"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_lines_are_answered_and_the_last_line_adds_up_the_usage(
    server: BatchServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "r.jsonl", request("a", "one"), request("b", "two", "/v1/chat/completions"))
    assert cli.main(["generate", str(file), server.url]) == 0
    said = capsys.readouterr()
    assert "2 of 2 lines have an answer; 10 prompt tokens (2 from a cache), 4 completion tokens in 0:0" in said.out
    assert said.err == ""  # no terminal, no progress
    answers = read(tmp_path / "r.out.jsonl")
    assert {name: line["response"]["body"]["choices"][0]["text"] for name, line in answers.items()} == {
        "a": "one",
        "b": "two",
    }
    assert list(answers["a"]) == ["id", "custom_id", "response", "error"] and answers["a"]["error"] is None
    assert answers["a"]["response"]["status_code"] == 200 and answers["a"]["response"]["request_id"] == "r-one"
    assert server.paths == {"/v1/completions": 1, "/v1/chat/completions": 1}
    assert not (tmp_path / "r.errors.jsonl").exists()


def test_bad_lines_and_refusals_are_errors_of_their_lines_alone(
    server: BatchServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = ["{", json.dumps({"method": "POST"}), json.dumps(request("u", "x", "/v1/images"))]
    file = write(tmp_path / "r.jsonl", *bad, request("t", "refuse 418: x"), request("h", "html: x"), request("a", "x"))
    assert cli.main(["generate", str(file), "--url", server.url, "--quiet"]) == 1
    assert list(read(tmp_path / "r.out.jsonl")) == ["a"]
    errors = [json.loads(line) for line in (tmp_path / "r.errors.jsonl").read_text().splitlines()]
    by_code = {one["error"]["code"] if one["error"] else one["response"]["status_code"] for one in errors}
    assert len(errors) == 5 and by_code == {"invalid_line", "no_json", 418}
    refused = read(tmp_path / "r.errors.jsonl")["t"]
    assert refused["response"]["body"] == {"error": {"message": "no tea"}} and refused["error"] is None
    assert server.tries_of("refuse 418: x") == 1
    said = capsys.readouterr()
    assert said.out == "" and "5 lines have no answer" in said.err


@pytest.mark.parametrize("prompt", ["busy 3: x", "down 3: x", "drop 3: x"])
def test_what_may_pass_is_tried_again(server: BatchServer, tmp_path: Path, prompt: str) -> None:
    file = write(tmp_path / "r.jsonl", request("a", prompt), request("b", "y"))
    assert cli.main(["generate", str(file), server.url]) == 0
    assert server.tries_of(prompt) == 4


def test_a_kept_connection_that_the_server_closed_costs_no_try(server: BatchServer, tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", *(request(f"a{i}", f"last: {i}") for i in range(5)))
    assert cli.main(["generate", str(file), server.url, "--concurrency", "1", "--retries", "0"]) == 0
    assert server.num_connections == 6  # one asked for the models


def test_tries_are_bounded(server: BatchServer, tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", request("a", "busy 3: x"), request("b", "y"))
    assert cli.main(["generate", str(file), server.url, "--retries", "2"]) == 1
    assert server.tries_of("busy 3: x") == 3
    assert read(tmp_path / "r.errors.jsonl")["a"]["response"]["status_code"] == 429


def test_started_again_it_asks_only_what_has_no_answer(
    server: BatchServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.jsonl"
    command = ["generate", str(file), server.url]
    write(file, request("a", "one"), request("b", "busy 1: two"))
    assert cli.main([*command, "--retries", "0"]) == 1
    assert cli.main(command) == 0  # the line that failed has its turn, and the errors are gone
    assert server.seen.count("one") == 1 and not (tmp_path / "r.errors.jsonl").exists()
    assert "2 of 2 lines have an answer (1 by earlier runs)" in capsys.readouterr().out
    write(file, request("new", "four"), request("b", "busy 1: two"), request("a", "one, changed"))
    assert cli.main(command) == 0
    assert sorted(server.seen) == ["busy 1: two", "busy 1: two", "four", "one", "one, changed"]
    assert read(tmp_path / "r.out.jsonl")["a"]["response"]["body"]["choices"][0]["text"] == "one, changed"
    write(file, request("a", "one"))
    assert cli.main(command) == 0  # changed back: the answer to the older text is not the newest
    assert server.seen.count("one") == 2
    before = len(server.seen)
    assert cli.main(command) == 0 and len(server.seen) == before


def test_a_line_torn_by_a_crash_is_asked_again(
    server: BatchServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "r.jsonl", request("a", "one"), request("b", "two"))
    assert cli.main(["generate", str(file), server.url, "--concurrency", "1"]) == 0
    out = tmp_path / "r.out.jsonl"
    whole = out.read_bytes()
    out.write_bytes(whole[:-9])
    assert cli.main(["generate", str(file), server.url]) == 0
    assert "a crash cut its last line" in capsys.readouterr().err
    assert server.seen == ["one", "two", "two"] and list(read(out)) == ["a", "b"]


def test_so_many_requests_are_open_and_no_more(server: BatchServer, tmp_path: Path) -> None:
    server.meeting = threading.Barrier(3)  # fewer at a time would wait here for ever
    file = write(tmp_path / "r.jsonl", *(request(f"a{i}", f"p{i}") for i in range(12)))
    assert cli.main(["generate", str(file), server.url, "--concurrency", "3"]) == 0
    assert server.most_open == 3
    assert server.num_connections <= 4  # one asked for the models, three are kept


def test_a_server_that_is_gone_ends_the_run_and_not_every_line(
    server: BatchServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "r.jsonl", request("a", "one"), *(request(f"d{i}", f"drop 9: {i}") for i in range(9)))
    assert cli.main(["generate", str(file), server.url, "--retries", "2", "--concurrency", "1"]) == 1
    said = capsys.readouterr().err
    assert f"no answer from {server.url}" in said and "1 of 10 lines have an answer" in said
    assert "The same command goes on from there" in said
    assert set(server.seen) == {"one", "drop 9: 0"} and list(read(tmp_path / "r.out.jsonl")) == ["a"]


def test_an_answer_that_takes_too_long_is_an_error(server: BatchServer, tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", request("a", "hold: x"))
    assert cli.main(["generate", str(file), server.url, "--timeout", "0.05"]) == 1
    assert read(tmp_path / "r.errors.jsonl")["a"]["error"]["code"] == "timeout"
    assert server.tries_of("hold: x") == 1


def test_keys_are_asked_for_and_sent(server: BatchServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.key = "secret"
    file = write(tmp_path / "r.jsonl", request("a", "one"))
    assert cli.main(["generate", str(file), server.url]) == 2
    assert "--api-key-file" in capsys.readouterr().err
    write_key(tmp_path / "key", "secret\n")
    assert cli.main(["generate", str(file), server.url, "--api-key-file", str(tmp_path / "key")]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.jsonl"], "there is no such file"),
        (["r.jsonl", "--out", "r.jsonl"], "three different files"),
        (["r.jsonl", "--concurrency", "0"], "--concurrency"),
        (["r.jsonl", "--retries", "-1"], "--retries"),
        (["r.jsonl", "--timeout", "0"], "--timeout"),
        (["r.jsonl", "http://127.0.0.1:9", "--model", "hashlm"], "--model and --up are for the command's own cluster"),
        (["r.jsonl", "--up", "'"], "--up"),
        (["r.jsonl", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9"),
        (["r.jsonl", "http://127.0.0.1:9", "--url", "http://127.0.0.1:8"], "the URL is given twice"),
    ],
)
def test_what_makes_no_sense(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("r.jsonl"), request("a", "one"))
    assert cli.main(["generate", *words]) == 2
    assert says in capsys.readouterr().err


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_in_its_midst_it_goes_on(server: BatchServer, tmp_path: Path, number: signal.Signals) -> None:
    lines = [*(request(f"a{i}", f"p{i}") for i in range(20)), *(request(f"h{i}", f"hold: {i}") for i in range(20))]
    file, out = write(tmp_path / "r.jsonl", *lines), tmp_path / "r.out.jsonl"
    command = [sys.executable, "-c", HEARS_CTRL_C, "generate", str(file), server.url, "--concurrency", "8"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: server.num_held == 8)
        process.send_signal(number)
        _, said = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert "stopped: 20 of 40 lines have an answer" in said and "The same command goes on from there" in said
        assert "Traceback" not in said
    assert sorted(read(out)) == sorted(f"a{i}" for i in range(20))
    server.may_answer.set()
    assert cli.main(["generate", str(file), server.url]) == 0
    assert len(read(out)) == 40 == len(out.read_text().splitlines())
    assert all(server.tries_of(f"p{i}") == 1 for i in range(20))


def test_progress_is_drawn_on_a_terminal_only(
    server: BatchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch, "REDRAW_S", 0.05)
    monkeypatch.setattr(batch, "Console", lambda stderr: Console(stderr=stderr, force_terminal=True, width=120))
    file = write(tmp_path / "r.jsonl", *(request(f"a{i}", f"busy 1: {i}") for i in range(8)))
    assert cli.main(["generate", str(file), server.url]) == 0
    assert "of 8 lines" in capsys.readouterr().err
    file = write(tmp_path / "q.jsonl", *(request(f"a{i}", f"busy 2: {i}") for i in range(8)))
    assert cli.main(["generate", str(file), server.url, "--quiet"]) == 0
    assert "of 8 lines" not in capsys.readouterr().err


class Scripted:
    """Stands in for the client: one answer after another."""

    def __init__(self, *answers: HttpAnswer) -> None:
        self._answers = iter(answers)

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        return next(self._answers)


def test_the_server_s_wait_is_kept() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    client: Any = Scripted(
        HttpAnswer(503, {"retry-after": "40"}), HttpAnswer(429), HttpAnswer(200, {}, bytearray(b"{}"))
    )
    asker = BatchClient(client, parse_url("h:1"), RetryLimits(5, HANG_GUARD_S, Backoff(1.0, 8.0)), sleep)
    line = asyncio.run(asker.answer(BatchRequest(1, "a", "/v1/completions", b"{}", "batch_req_1")))
    assert line.response is not None and line.response.status_code == 200
    assert slept[0] == 40.0 and 1.0 <= slept[1] <= 2.0


class Broken:
    """Stands in for a client whose connections all break."""

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        raise ConnectionResetError("reset")


@pytest.mark.parametrize("others_are_answered", [True, False])
def test_a_line_that_alone_breaks_a_connection_is_its_own_error(others_are_answered: bool) -> None:
    async def sleep(seconds: float) -> None:
        asker.num_answers += others_are_answered

    client: Any = Broken()
    asker = BatchClient(client, parse_url("h:1"), RetryLimits(2, HANG_GUARD_S), sleep)
    answer = asker.answer(BatchRequest(1, "a", "/v1/completions", b"{}", "batch_req_1"))
    if others_are_answered:
        line = asyncio.run(answer)
        assert line.error is not None and (line.error.code, line.error.message) == ("no_answer", "reset")
    else:
        with pytest.raises(BatchStopped, match="no answer from http://h:1: reset"):
            asyncio.run(answer)


def test_the_file_is_read_as_it_goes() -> None:
    """No further than what is asked."""
    taken: list[int] = []
    written: list[str | None] = []

    def lines() -> Iterator[BatchRequest]:
        for number in range(1000):
            taken.append(number)
            yield BatchRequest(number, str(number), "/v1/completions", b"{}", "batch_req_1")

    class Slow:
        async def answer(self, request: BatchRequest) -> OutputLine:
            await asyncio.sleep(0)
            assert len(taken) - len(written) <= 4
            return OutputLine(request.id, request.custom_id, ResponsePart(200, "", {}), None)

    class Sink:
        def take_line(self, line: OutputLine) -> None:
            written.append(line.custom_id)

    asker: Any = Slow()
    results: Any = Sink()
    asyncio.run(run_all(lines(), asker, results, 4))
    assert len(written) == 1000
