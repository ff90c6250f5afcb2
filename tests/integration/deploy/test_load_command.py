"""`baton load` as a person runs it, against a scripted server: each injected fault is found, by its check alone."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest
from rich.console import Console

from deploy import cli
from deploy.tools.load import harness
from deploy.tools.traffic import live, truth
from deploy.tools.traffic import one_run as play
from shared.core import launcher
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.mock_openai import Behaviour, in_thread, token_of

FAST = ["--rate", "400", "--duration", "30", "--requests", "60", "--output-tokens", "8", "--quiet", "--stall", "60"]
FAST += ["--golden-every", "3", "--rest", "2"]


@pytest.fixture(autouse=True)
def on_any_machine(monkeypatch):
    """Short polls; and a machine that is busy may take its time between server and client, which share it."""
    monkeypatch.setattr(play, "POLL_S", 0.01)
    monkeypatch.setattr(truth, "TTFT_SLACK_S", 20.0)
    monkeypatch.setattr(truth, "ITL_SLACK_S", 20.0)
    monkeypatch.setattr(truth, "LAG_BOUND_S", 20.0)


def run(capsys, behaviour, *flags):
    """(exit status, what the checks say by name, the server)"""
    with in_thread(behaviour) as mock:
        status = cli.main(["load", f"http://127.0.0.1:{mock.port}", *FAST, *flags])
    text = capsys.readouterr().out
    marks = re.findall(r"^ (\w+) +(ok|FAILED|doubtful|-)  ", text, re.MULTILINE)
    return status, dict(marks), text, mock


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_true_server_passes_every_check(capsys, api):
    status, marks, text, _ = run(capsys, Behaviour(), "--api", api)
    assert marks == dict.fromkeys(("answers", "tokens", "stalls", "leaks", "agreement"), "ok") | {
        "client": marks["client"]
    }
    assert status == 0 and "20 of 20 answers to golden prompts are equal" in text


# a fault, the check that must find it, and words that it must say
FAULTS = [
    (Behaviour(wrong_at=(2, 5)), [], "tokens", "1 of 20 answers to golden prompts differ"),
    (Behaviour(stall_at=(20, 3), stall_s=4.0), ["--stall", "3"], "stalls", "before chunk 3"),
    (Behaviour(leak_after=30), [], "leaks", "decode-0: 1 pages held"),
    (Behaviour(metrics_shift_s=60.0), [], "agreement", "there"),
    (Behaviour(break_at=(25, 4)), [], "answers", "1 of 60 requests failed"),
]


@pytest.mark.parametrize(("behaviour", "flags", "check", "words"), FAULTS, ids=[row[2] for row in FAULTS])
def test_an_injected_fault_is_found_by_its_check_alone(capsys, behaviour, flags, check, words):
    status, marks, text, _ = run(capsys, behaviour, *flags)
    assert status == 1 and words in text
    assert [name for name, mark in marks.items() if mark == "FAILED"] == [check]


def test_a_wrong_token_at_a_near_tie_is_only_doubtful(capsys):
    status, marks, text, _ = run(capsys, Behaviour(wrong_at=(2, 5), margin=0.05))
    assert (status, marks["tokens"]) == (0, "doubtful") and "0.0500 apart" in text
    status, marks, _, _ = run(capsys, Behaviour(wrong_at=(2, 5), margin=0.05), "--near-tie", "0.01")
    assert (status, marks["tokens"]) == (1, "FAILED")


def test_another_server_is_compared_by_text_and_skips_are_named(capsys):
    status, marks, text, mock = run(capsys, Behaviour(ours=False))
    assert status == 0 and (marks["leaks"], marks["agreement"]) == ("-", "-")
    assert text.count("this needs a Baton router's /metrics") == 2 and "(as text)" in text
    assert not any({"return_token_ids", "ignore_eos", "logprobs"} & set(body) for body in mock.seen)
    status, marks, text, _ = run(capsys, Behaviour(ours=False, wrong_at=(2, 5)))
    assert (status, marks["tokens"]) == (1, "FAILED") and "character" in text


def test_hang_ups_and_storms_find_a_leak_only_where_there_is_one(capsys):
    trouble = ["--hang-up", "0.5", "--storm", "0.05:0.5"]
    status, marks, text, mock = run(capsys, Behaviour(itl_s=0.002), *trouble)
    assert (status, marks["leaks"], marks["answers"]) == (0, "ok", "ok") and "left by us on purpose" in text
    assert mock.num_gone > 5
    status, marks, _, _ = run(capsys, Behaviour(itl_s=0.002, leak_after=10), *trouble)
    assert (status, marks["leaks"]) == (1, "FAILED")


def test_a_server_that_forgets_to_end_what_clients_left_is_found(capsys):
    status, marks, text, _ = run(capsys, Behaviour(itl_s=0.002, gone_stay_open=True), "--hang-up", "0.5")
    assert (status, marks["leaks"]) == (1, "FAILED") and "are still open there" in text


def test_a_server_that_dies_under_load_leaves_a_report(capsys, tmp_path):
    status, marks, text, _ = run(capsys, Behaviour(metrics_until=30), "--rest", "0", "--out", str(tmp_path))
    assert (status, marks["leaks"], marks["agreement"]) == (1, "FAILED", "-")
    assert "/metrics no longer answers" in text and (tmp_path / "report.json").exists()


def test_a_server_that_dies_in_a_sweep_leaves_a_report(capsys, tmp_path):
    flags = ["--sweep", "--requests", "10", "--slo", "ttft<60s", "--rest", "0", "--out", str(tmp_path)]
    status, marks, text, _ = run(capsys, Behaviour(metrics_until=20), *flags)
    assert (status, marks["leaks"]) == (1, "FAILED") and "is a server running there" in text
    assert (tmp_path / "report.json").exists()


def test_golden_answers_outlive_the_run(capsys, tmp_path):
    file = tmp_path / "golden.json"
    _, _, _, first = run(capsys, Behaviour(), "--golden-file", str(file))
    status, marks, _, second = run(capsys, Behaviour(), "--golden-file", str(file))
    assert (status, marks["tokens"]) == (0, "ok")
    assert len(first.seen) == len(second.seen) + 4  # not asked again
    status, marks, _, _ = run(capsys, Behaviour(wrong_at=(2, 5)), "--golden-file", str(file))
    assert (status, marks["tokens"]) == (1, "FAILED")


def test_files_hold_what_was_shown(capsys, tmp_path):
    folder = tmp_path / "out"
    _, _, text, _ = run(capsys, Behaviour(itl_s=0.001), "--out", str(folder))
    report = json.loads((folder / "report.json").read_text())
    assert report["summary"]["num_ok"] == 60 and len(report["rows"]) == 60 and report["format"] == 1
    with (folder / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60 and {row["output_tokens"] for row in rows} == {"8"}
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 5 and "<script" not in page
    assert not re.search(r'(src|href)="(?!#)', page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    for file in folder.iterdir():
        assert " w1" not in file.read_text()  # no text of answers


def test_a_trace_is_asked_to_its_end(capsys, tmp_path):
    file = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 10 * i, "input_length": 20 + i, "output_length": 3 + i % 4} for i in range(12)]
    file.write_text("\n".join(map(json.dumps, rows)))
    status, marks, text, mock = run(capsys, Behaviour(), "--trace", str(file), "--golden", "0")
    assert status == 0 and "12 requests in" in text
    lengths = sorted(len(body["messages"][0]["content"].split()) for body in mock.seen)
    assert lengths == [20 + i for i in range(12)]
    status, marks, text, mock = run(capsys, Behaviour(), "--trace", str(file))
    assert (status, marks["tokens"]) == (0, "ok") and "4 of 4 answers" in text


AGENT = ["--agents", "1", "--turns", "6", "--think", "0.001-0.01", "--fan-out", "3", "--golden", "0"]
AGENT += ["--prompt-tokens", "5", "--prefix-tokens", "40", "--prefix-groups", "1", "--requests", "48"]


def test_an_agent_returns_with_the_result_of_its_call(capsys, tmp_path):
    status, marks, text, mock = run(capsys, Behaviour(caches=True, call_words=6), *AGENT, "--out", str(tmp_path))
    assert (status, marks["answers"]) == (0, "ok") and "3 sessions, 18 turns, 15 calls of tools" in text
    own = max(mock.seen[13:16], key=lambda body: len(body["messages"][-1]["content"]))
    messages = own["messages"]
    assert [message["role"] for message in messages] == ["system", "user", *("assistant", "tool") * 5]
    task = "\n".join(message["content"] for message in messages[:2])
    (call,) = messages[2]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["command"] == " ".join(f"w{token_of(task, i)}" for i in range(6))
    assert messages[3]["tool_call_id"] == call["id"]
    assert [len(message["content"].split()) for message in messages[3::2]] == [5, *[2 * 8 + 5] * 4]
    (tool,) = own["tools"]
    assert tool["function"]["name"] == call["function"]["name"]
    assert sorted(body["tool_choice"] for body in mock.seen[:4]) == ["auto", "auto", "required", "required"]
    assert own["tool_choice"] == "auto" and not any(body["ignore_eos"] for body in mock.seen)


@pytest.mark.parametrize(
    "without", [["--api", "completions"], ["--extra-body", '{"tools": null}']], ids=["api", "body"]
)
def test_an_agent_goes_on_without_calls_where_there_are_none(capsys, without):
    status, marks, text, mock = run(capsys, Behaviour(call_words=6), *AGENT, *without)
    assert (status, marks["answers"]) == (0, "ok") and "3 sessions, 18 turns; " in text
    assert not any({"tools", "tool_choice", "parallel_tool_calls"} & set(body) for body in mock.seen)
    assert {body["max_tokens"] for body in mock.seen} == {8}
    if "messages" in mock.seen[13]:
        roles = [message["role"] for message in mock.seen[13]["messages"]]
        assert roles == ["system", *("user", "assistant") * 5, "user"]


def test_the_report_shows_which_words_were_new(capsys, tmp_path):
    """A later turn's own words, and of the history its last call, and what others said beside it."""
    run(capsys, Behaviour(caches=True, call_words=6), *AGENT, "--out", str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    new = 40 + 3 * (5 + (6 + 3 * 5) + 4 * (6 + 2 * 8 + 3 * 5))
    talks, rows = report["summary"]["talks"], report["rows"]
    assert sum(row["prompt_tokens"] - row["cached_tokens"] for row in rows) == new
    assert talks["computed"]["value"] == pytest.approx(new / sum(row["prompt_tokens"] for row in rows))
    assert [(row["turns"], row["num_requests"]) for row in talks["by_turn"]] == [
        ("1", 3), ("2", 9), ("3-5", 27), ("6+", 9), ("several at once", 45),
    ]  # fmt: skip


def test_two_runs_side_by_side(capsys, tmp_path):
    for name, itl_s in (("before", 0.05), ("after", 0.001)):
        run(capsys, Behaviour(itl_s=itl_s), "--out", str(tmp_path / name))
    assert cli.main(["load", "compare", str(tmp_path / "before"), str(tmp_path / "after" / "report.json")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"TPOT p50 ms.*-\d\d\.\d%.*better", text)
    assert cli.main(["load", "compare", str(tmp_path / "before")]) == 2
    assert cli.main(["load", "compare", str(tmp_path), str(tmp_path)]) == 2


def test_a_sweep_ends_between_a_passing_and_a_failing_rate(capsys, tmp_path, monkeypatch):
    """The mock does not slow down: here the share within the SLO is scripted by rate."""
    from deploy.tools.traffic.figures.figures import Estimate

    real = harness.run_load

    def scripted(plan, stage, goldens):
        import dataclasses

        outcome = real(plan, stage, goldens)
        share = 1.0 if plan.load.arrivals.rate <= 500 else 0.2
        summary = dataclasses.replace(outcome.summary, slo_share=Estimate(share, share, share))
        return dataclasses.replace(outcome, summary=summary)

    monkeypatch.setattr(harness, "run_load", scripted)
    flags = ["--sweep", "--requests", "10", "--out", str(tmp_path)]
    status, _, text, _ = run(capsys, Behaviour(), *flags)
    best = float(re.search(r"highest rate within .*: ([0-9.]+) requests/s", text)[1])
    assert status == 0 and 454 <= best <= 500
    assert (tmp_path / "report.html").read_text().count("<svg") == 6


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["http://127.0.0.1:9"], "is a server running there"),
        (["ftp://x"], "not a server's address"),
        (["http://a:1/x", "http://b:1/y"], "the same path"),
        (["--slo", "fast"], "--slo"),
        (["--rate", "0"], "--rate"),
        (["--hang-up", "2"], "--hang-up"),
        (["--storm", "20"], "--storm"),
        (["--drill", "kill:x"], "--drill"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--warmup", "60"], "--warmup"),
        (["--golden-every", "0"], "--golden-every"),
        (["--prompts", "a", "--trace", "b"], "not both"),
        (["--agents", "0"], "--agents"),
        (["--agents", "3", "--concurrency", "3"], "--agents makes its own sessions"),
        (["--agents", "3", "--prompts", "a"], "--agents makes its own sessions"),
        (["--sweep", "--agents", "3"], "--sweep"),
        (["--think", "5-1"], "--think"),
        (["--fan-out", "0"], "--fan-out"),
        (["--trace", "b", "--concurrency", "3"], "no --concurrency"),
        (["--sweep", "--concurrency", "3"], "--sweep"),
        (["--sweep", "--drill", "kill:x@3"], "--sweep"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_sent(capsys, flags, words):
    assert cli.main(["load", *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_server_without_a_model_list_needs_a_name(capsys):
    with in_thread(Behaviour()) as mock:
        assert cli.main(["load", f"http://127.0.0.1:{mock.port}/elsewhere", *FAST]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_drill_needs_a_node_that_is_there(capsys):
    with in_thread(Behaviour()) as mock:
        assert cli.main(["load", f"http://127.0.0.1:{mock.port}", *FAST, "--drill", "kill:decode-7@1"]) == 2
    assert "decode-7" in capsys.readouterr().err


def test_progress_is_drawn_on_a_terminal_and_lines_elsewhere(capsys, monkeypatch):
    with in_thread(Behaviour()) as mock:
        url = f"http://127.0.0.1:{mock.port}"
        flags = [flag for flag in FAST if flag != "--quiet"] + ["--requests", "30", "--rate", "100"]
        monkeypatch.setattr(live, "REDRAW_S", 0.05)
        monkeypatch.setattr(live, "LINE_S", 0.05)
        assert cli.main(["load", url, *flags]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"^time \d+ s  sent \d+  open \d+", shown, re.MULTILINE)
        assert shown.startswith("asking 4 golden prompts before the load, one by one\n")
        monkeypatch.setattr(harness, "make_console", lambda: Console(force_terminal=True, width=120))
        assert cli.main(["load", url, *flags]) == 0
    drawn = capsys.readouterr().out
    assert "tokens/s" in drawn and "\x1b[" in drawn


@pytest.mark.parametrize("load", [["--rate", "50"], ["--agents", "20"]], ids=["rate", "agents"])
def test_ctrl_c_ends_a_run_with_what_there_is(tmp_path, load):
    with in_thread(Behaviour(itl_s=0.05)) as mock:
        url, out = f"http://127.0.0.1:{mock.port}", tmp_path / "out"
        command = launcher.command("deploy.cli", "load", url, *load, "--golden", "0", "--out", str(out))
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            while len(mock.seen) < 20 and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            text, _ = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 0, text
    summary = json.loads((out / "report.json").read_text())["summary"]
    assert summary["num_hung_up"] > 0 and summary["num_failed"] == 0
    assert 0 < summary["seconds"] < 60


def test_the_command_line_loads_neither_numpy_nor_matplotlib():
    code = "import sys, deploy.cli; print(sorted({'numpy', 'matplotlib', 'rich', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
