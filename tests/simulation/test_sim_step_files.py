"""Steps of simulated nodes as files that `baton trace` joins: all lives, in one time, and nothing runs otherwise."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.tools import trace
from tests.support.sim.cluster import run_seed

SEED = 3


def test_a_simulated_run_s_steps_are_one_trace(tmp_path: Path) -> None:
    report = run_seed(SEED, record_dir=tmp_path)
    assert not report.failure and report.digest == run_seed(SEED).digest
    nodes = [json.loads(file.read_text("utf-8")) for file in sorted(tmp_path.glob("*.steps.json"))]
    assert len({node["node"].partition(".")[0] for node in nodes}) == report.num_nodes
    events = trace.trace_of(nodes)
    slices = [event for event in events if event["ph"] == "X"]
    assert {"forward", "sample", "publish", "stash", "d2h", "wait"} <= {one["name"] for one in slices}
    assert all(0 <= one["ts"] <= 1e6 * (report.sim_s + 1) for one in slices)
    sends = {event["id"]: event for event in events if event["ph"] == "s" and event["name"] == "hand-off"}
    takes = {event["id"]: event for event in events if event["ph"] == "f" and event["name"] == "hand-off"}
    assert sends and sends.keys() == takes.keys()
    assert all(sends[one]["pid"] != takes[one]["pid"] for one in sends)
