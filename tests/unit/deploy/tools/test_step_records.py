"""Steps that are recorded while somebody asks, and `baton trace`'s file of them."""

from __future__ import annotations

import argparse
import io
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.tools import trace
from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.node.loop.node import Node
from shared.node.machine.recording import FolderRecording
from shared.node.records.request_spans import RequestSpans
from shared.observe.log import Logger
from shared.observe.step_records import MOST_ROWS, StepRecords, StepRow
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.node_pair import Net, make_node


def recorded_pair(width: int = 1) -> tuple[Node, Node]:
    knobs = CoreKnobs(chunk_size=32, width=width)
    nodes = make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)
    for node in nodes:
        node.ctx.spans = node._watch._spans = RequestSpans(None, node.ctx.core.engine.records)
    return nodes


def run_one(nodes: tuple[Node, Node]) -> None:
    net = Net(nodes)
    net.generate(nodes[0], Job(0, tuple(range(70)), SamplingParams(max_tokens=9), 7), nodes[1])
    net.run()


def names_of(rows: list[StepRow]) -> dict[str, set[str]]:
    return {track: {row.name for row in rows if row.track == track} for track in {row.track for row in rows}}


def until(condition: Callable[[], object], act: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < deadline
        act()
        time.sleep(0.01)


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    records = StepRecords()
    records.add_row("host", "a", 1, 0.0, 1.0)
    records.mark("host", "b", 1)

    def work() -> int:
        return 3

    assert records.timed("host", "c", 1, work) is work and records.take_rows() == []


def test_the_ring_keeps_the_newest_rows_of_its_recording() -> None:
    records = StepRecords(lambda: 5.0)
    for _ in range(2):
        records.begin_records()
        for step in range(MOST_ROWS + 3):
            records.mark("forward", "publish", step)
    rows = records.take_rows()
    assert len(rows) == MOST_ROWS and rows[0] == StepRow("forward", "publish", "3", 5.0, 5.0)


def test_a_closure_is_recorded_to_its_generator_s_end() -> None:
    now = [0.0]
    records = StepRecords(lambda: now[0])
    records.begin_records()

    def steps() -> Any:
        now[0] = 1.0
        yield
        now[0] = 2.0
        return "end"

    running = records.timed("forward", "forward", 7, steps)()
    with pytest.raises(StopIteration) as ended:
        while True:
            next(running)
    assert ended.value.value == "end" and records.take_rows() == [StepRow("forward", "forward", "7", 0.0, 2.0)]


@pytest.mark.parametrize("width", [1, 4])
def test_both_nodes_record_their_streams_and_requests(width: int) -> None:
    nodes = recorded_pair(width)
    records = [node.ctx.core.engine.records for node in nodes]
    for one in records:
        one.begin_records()
    run_one(nodes)
    prefill, decode = (one.take_rows() for one in records)
    published = {"publish"} if width > 1 else set()
    assert names_of(prefill)["forward"] == {"forward", "sample", "stash"} | published
    assert names_of(decode)["forward"] == {"forward", "sample", "stash", "admit"} | published
    assert names_of(decode)["copy"] == {"d2h"} and names_of(decode)["transfer"] == {"pull"}
    assert names_of(prefill)["requests"] == {"wait", "offer", "hand-off"}
    assert names_of(decode)["requests"] == {"memory", "transfer", "install"}
    steps = [row.of for row in decode if row.name == "forward"]
    assert [row.of for row in decode if row.name == "sample"] == steps == sorted(set(steps), key=int)


def file_of(node: str, shift: float, *rows: tuple[str, str, str, float, float]) -> dict[str, Any]:
    return {"node": node, "shift": shift, "rows": [list(row) for row in rows]}


def test_one_file_has_both_nodes_and_arrows_to_who_waits() -> None:
    prefill = file_of("p0", 10.0, ("forward", "sample", "1", 0.0, 2.0), ("requests", "hand-off", "r#0.0", 2.0, 5.0))
    decode = file_of(
        "d0",
        20.0,
        ("forward", "publish", "publish(4)", 1.0, 1.0),
        ("host", "wait for publish", "publish(4)", 0.5, 1.5),
        ("forward", "publish", "publish(9)", 1.1, 1.1),
        ("forward", "stash", "4", 1.2, 1.2),
        ("forward", "forward", "4", 0.0, 1.0),
        ("forward", "forward", "5", 2.0, 3.0),
        ("requests", "install", "r#0.0", 3.0, 4.0),
        ("requests", "memory", "s#0.0", 3.5, 3.6),
    )
    events = trace.trace_of([prefill, decode])
    processes = {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"}
    assert processes == {"d0": 1, "p0": 2}
    slices = {(one["pid"], one["name"], one["args"]["of"]): one for one in events if one["ph"] == "X"}
    assert len(slices) == 10
    first = slices[1, "forward", "4"]
    assert (first["ts"], first["dur"]) == (20e6, 1e6) and slices[2, "hand-off", "r#0.0"]["ts"] == 12e6
    lanes = {slices[1, "install", "r#0.0"]["tid"], slices[1, "memory", "s#0.0"]["tid"]}
    assert len(lanes) == 2 and min(lanes) >= trace.FIRST_REQUEST
    flows = [one for one in events if one["ph"] in "sf"]
    ids = [(one["name"], one["id"]) for one in flows if one["ph"] == "s"]
    assert sorted(name for name, _ in ids) == ["hand-off", "publish", "publish", "stash"] and len(set(ids)) == 4
    assert sorted((one["name"], one["id"]) for one in flows if one["ph"] == "f") == sorted(ids)
    arrows = {name: {one["ph"]: one for one in flows if one["id"] == flow} for name, flow in ids if "(9)" not in flow}
    (unwaited,) = [one for one in flows if one["ph"] == "f" and "publish(9)" in one["id"]]
    assert unwaited["ts"] == slices[1, "forward", "5"]["ts"]
    assert arrows["hand-off"]["s"]["pid"] == 2 and arrows["hand-off"]["f"]["pid"] == 1
    assert arrows["publish"]["f"]["tid"] == 1 + trace.STREAMS.index("host")
    assert arrows["stash"]["f"]["ts"] == slices[1, "forward", "5"]["ts"]
    for one in arrows.values():
        enclosing = [s for s in slices.values() if (s["pid"], s["tid"]) == (one["f"]["pid"], one["f"]["tid"])]
        assert any(s["ts"] <= one["f"]["ts"] <= s["ts"] + s["dur"] for s in enclosing)


def arguments(file: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    return parser.parse_args([str(file), *words])


def test_a_folder_starts_and_ends_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command and two nodes' rounds, in one process; the command waits for what the nodes write."""
    monkeypatch.setattr(trace, "BEGIN_S", 0.0)
    nodes = recorded_pair()
    log = Logger("n", io.StringIO())
    folder = tmp_path / "steps"
    folder.mkdir()
    (folder / "gone.steps.json").write_text("of an earlier recording")
    all_records = [node.ctx.core.engine.records for node in nodes]
    recordings = [
        FolderRecording(str(folder), node.ctx.facts.node_id, records, log)
        for node, records in zip(nodes, all_records, strict=True)
    ]

    def rounds() -> None:
        for recording in recordings:
            recording.look_for_file()

    has_run = threading.Event()
    monkeypatch.setattr(trace.time, "sleep", lambda seconds: has_run.wait(HANG_GUARD_S))
    done: list[int] = []
    args = arguments(tmp_path / "out.json", "--record-dir", str(folder), "--seconds", "0")
    command = threading.Thread(target=lambda: done.append(trace.run(args)))
    command.start()
    deadline = time.monotonic() + HANG_GUARD_S
    while not all(records.is_on for records in all_records):
        assert time.monotonic() < deadline
        rounds()
    run_one(nodes)
    has_run.set()
    while command.is_alive():
        assert time.monotonic() < deadline
        rounds()
    assert done == [0] and "2 nodes" in capsys.readouterr().out
    assert sorted(file.name for file in folder.iterdir()) == ["d0.steps.json", "p0.steps.json"]
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert {one["name"] for one in events if one["ph"] == "s"} == {"hand-off", "sample", "stash"}


def test_a_folder_that_no_node_follows_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "BEGIN_S", 0.0)
    args = arguments(tmp_path / "out.json", "--record-dir", str(tmp_path), "--seconds", "0")
    with pytest.raises(ConfigError, match="no node follows .*: start nodes with --record-dir"):
        trace.run(args)
    assert not (tmp_path / "on").exists()
    with pytest.raises(ConfigError, match="give --record-dir, or files"):
        trace.run(arguments(tmp_path / "out.json"))
    with pytest.raises(ConfigError, match="is not a folder"):
        trace.run(arguments(tmp_path / "out.json", "--record-dir", str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="is not a folder"):
        FolderRecording(str(tmp_path / "none"), "n", StepRecords(), Logger("n", io.StringIO()))


def test_a_folder_that_can_t_be_written_ends_nobody(tmp_path: Path) -> None:
    lines, records = io.StringIO(), StepRecords()
    recording = FolderRecording(str(tmp_path), "no/such", records, Logger("n", lines))
    (tmp_path / "on").touch()
    recording.look_for_file()
    assert records.is_on and "steps can't be recorded" in lines.getvalue()


def test_a_node_that_can_t_write_its_steps_lets_nobody_wait(tmp_path: Path) -> None:
    """`baton trace` waits until the mark is gone. What was half written goes, too."""
    lines, now = io.StringIO(), iter(range(100))
    records = StepRecords(lambda: float(next(now)))
    recording = FolderRecording(str(tmp_path), "d0", records, Logger("n", lines))
    (tmp_path / "on").touch()
    recording.look_for_file()
    assert (tmp_path / "d0.recording").exists()
    (tmp_path / "d0.steps.json").mkdir()  # no file can take its place
    (tmp_path / "on").unlink()
    recording.look_for_file()
    for writer in threading.enumerate():
        if writer.name == "step records":
            writer.join(HANG_GUARD_S)
    assert "steps can't be recorded" in lines.getvalue()
    assert [path.name for path in tmp_path.iterdir()] == ["d0.steps.json"]


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_time_that_is_none_is_said_before_all(seconds: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--seconds is {seconds}; it must be from 0 to 3600"):
        trace.run(arguments(tmp_path / "out.json", "--record-dir", str(tmp_path), f"--seconds={seconds}"))


@pytest.mark.parametrize("held", ["", "[1]", '{"traceEvents": []}'])
def test_a_file_that_no_node_wrote_is_named(held: str, tmp_path: Path) -> None:
    other = tmp_path / "steps.json"
    with pytest.raises(ConfigError, match=r"steps.json: No such file"):
        trace.run(arguments(tmp_path / "out.json", str(other)))
    other.write_text(held)
    with pytest.raises(ConfigError, match=r"steps.json does not hold a node's steps"):
        trace.run(arguments(tmp_path / "out.json", str(other)))


def test_steps_are_kept_if_the_trace_can_t_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(folder: Path, seconds: float) -> list[Path]:
        (folder / "d0.steps.json").write_text(json.dumps(file_of("d0", 0.0)))
        return [folder / "d0.steps.json"]

    monkeypatch.setattr(trace, "record", record)
    with pytest.raises(ConfigError, match=r"can't write .*No such file.*; the steps are kept: baton trace OTHER_FILE "):
        trace.run(arguments(tmp_path / "none" / "out.json", "--record-dir", str(tmp_path)))
    with pytest.raises(ConfigError, match=r"can't write .*: No such file or directory$"):
        trace.run(arguments(tmp_path / "none" / "out.json", str(tmp_path / "d0.steps.json")))


def test_a_node_that_was_killed_or_wrote_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed node's mark is taken for no node's; a node whose disk is full leaves its own."""
    monkeypatch.setattr(trace, "BEGIN_S", 0.0)
    monkeypatch.setattr(trace, "WRITE_S", 0.0)
    args = arguments(tmp_path / "out.json", "--record-dir", str(tmp_path), "--seconds", "0")
    (tmp_path / "killed.recording").touch()
    with pytest.raises(ConfigError, match="no node follows"):
        trace.run(args)

    def record(seconds: float) -> None:
        (tmp_path / "full.recording").touch()

    monkeypatch.setattr(trace.time, "sleep", record)
    with pytest.raises(ConfigError, match="there are no steps in "):
        trace.run(args)
    assert "full wrote no steps into " in capsys.readouterr().err


def test_nodes_that_a_killed_command_left_recording_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = FolderRecording(str(tmp_path), "d0", StepRecords(), Logger("d0", io.StringIO()))
    (tmp_path / "on").touch()
    recording.look_for_file()
    assert (tmp_path / "d0.recording").exists()
    monkeypatch.setattr(trace.time, "sleep", lambda seconds: None)
    assert trace.ask_nodes(tmp_path, 0.0) == {"d0"}


def test_a_folder_that_takes_no_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "on").mkdir()  # root may write anywhere else
    with pytest.raises(ConfigError, match=r"--record-dir .*: Is a directory"):
        trace.run(arguments(tmp_path / "out.json", "--record-dir", str(tmp_path), "--seconds", "0"))
