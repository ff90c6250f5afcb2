"""`baton generate` with a cluster of its own: answered, stopped, killed; nothing of it is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shared.core import launcher
from tests.support.clusters.cluster import ROOT
from tests.support.machine.patience import HANG_GUARD_S

# a background job of a shell ignores Ctrl-C, and so do its children: this one hears it again
HEARS_CTRL_C = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from deploy import cli; "
HEARS_CTRL_C += "sys.exit(cli.main(sys.argv[1:]))"


def write(path: Path, num_lines: int, max_tokens: int) -> Path:
    body = {"model": "hashlm", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    lines = [
        {"custom_id": f"a{i}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": f"prompt {i}"}}
        for i in range(num_lines)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def start(file: Path) -> subprocess.Popen[str]:
    words = ["generate", str(file), "--model", "hashlm", "--up", "--prefill 0 --decode 1", "--concurrency", "4"]
    command = [sys.executable, "-c", HEARS_CTRL_C, *words]
    own = os.environ | {"TMPDIR": str(file.parent)}  # what a killed run leaves there goes with the test
    return subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def answers(file: Path) -> list[str]:
    """Texts by custom_id, in order of the input."""
    out = file.with_name(f"{file.stem}.out.jsonl")
    found = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, out.read_text().splitlines())}
    return [found[f"a{i}"]["choices"][0]["text"] for i in range(len(found))]


def finish(file: Path) -> str:
    with start(file) as process:
        said, _ = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of a run that nobody stopped."""
    file = write(tmp_path_factory.mktemp("whole") / "whole.jsonl", 40, max_tokens=48)
    finish(file)
    return answers(file)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_resumes_and_leaves_no_process_running(
    tmp_path: Path, number: signal.Signals, whole: list[str]
) -> None:
    file = write(tmp_path / "stopped.jsonl", 40, max_tokens=48)
    out = tmp_path / "stopped.out.jsonl"
    with start(file) as process:
        deadline = time.monotonic() + HANG_GUARD_S
        while not out.exists() or out.read_bytes().count(b"\n") < 4:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.01)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        said, _ = process.communicate(timeout=HANG_GUARD_S)
    assert len(children) >= 3  # `baton up`, a router, a node
    _, alive = psutil.wait_procs(children, timeout=HANG_GUARD_S)
    assert not alive
    if number == signal.SIGINT:
        assert process.returncode == 130 and "The same command goes on from there" in said, said
    num_before = out.read_bytes().count(b"\n")
    assert 4 <= num_before < 40
    said = finish(file)
    assert f"40 of 40 lines have an answer ({num_before} by earlier runs)" in said
    assert answers(file) == whole and len(whole) == 40


def test_a_cluster_that_does_not_start_is_explained(tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", 1, max_tokens=1)
    command = launcher.command("deploy.cli", "generate", str(file), "--model", "/nothing/here")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD_S)
    assert done.returncode == 2 and "no such file or folder" in done.stderr and "Traceback" not in done.stderr
