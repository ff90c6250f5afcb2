"""`baton trace FILE`: what all nodes' streams do for some seconds, as one file for Perfetto.

The file has Chrome's trace event format: a process per node, a thread per stream, arrows from who publishes to who
waits. https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.core.errors import ConfigError
from shared.observe.step_records import StepRow

DESCRIPTION = """\
baton trace: record what the nodes' streams do for some seconds: forwards, sampling, publishing, stashing, copies, and
each request's stages. Open the file at https://ui.perfetto.dev, which reads it in the browser.

  baton up --record-dir /tmp/steps
  baton trace steps.json --record-dir /tmp/steps --seconds 5
  baton trace steps.json a/prefill-0.steps.json b/decode-0.steps.json      nodes of several machines, recorded apart
"""
ASKED, RECORDING, STEPS = "on", "*.recording", "*.steps.json"  # as in shared/node/machine/recording.py
POLL_S = 0.05
BEGIN_S = 2.0  # in which every node notices that it is asked
WRITE_S = 60.0
MOST_S = 3600.0
STREAMS = ("host", "forward", "copy", "transfer", "cold")  # threads 1 to 5; requests come below
FIRST_REQUEST = 10  # thread id


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    parser.add_argument("records", type=Path, nargs="*", metavar="NODE.steps.json", help="join these; record nothing")
    parser.add_argument("--record-dir", type=Path, metavar="DIR", help="the folder that the nodes' --record-dir names")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="how long to record (default: 5)")


def run(args: argparse.Namespace) -> int:
    if bool(args.records) == (args.record_dir is not None):
        raise ConfigError("give --record-dir, or files that nodes have recorded")
    if not 0.0 <= args.seconds <= MOST_S:
        raise ConfigError(f"--seconds is {args.seconds:g}; it must be from 0 to {MOST_S:g}")
    files = args.records or record(args.record_dir, args.seconds)
    events = trace_of([read_steps(file) for file in files])
    write_trace(args.file, events, args.record_dir)
    print(f"{args.file}: {len(files)} nodes, {len(events)} events; open it at https://ui.perfetto.dev")
    return 0


def record(folder: Path, seconds: float) -> list[Path]:
    """Return what each node that follows the folder has written. Raise ConfigError if none does or has."""
    if not folder.is_dir():
        raise ConfigError(f"--record-dir {folder} is not a folder")
    try:
        began = ask_nodes(folder, seconds)
    except OSError as error:
        raise ConfigError(f"--record-dir {folder}: {error.strerror}") from None
    if not began:
        raise ConfigError(f"no node follows {folder}: start nodes with --record-dir {folder.absolute()}")
    until = time.monotonic() + WRITE_S
    while any(folder.glob(RECORDING)) and time.monotonic() < until:
        time.sleep(POLL_S)
    written = sorted(folder.glob(STEPS))
    silent = began - {file.name.removesuffix(STEPS[1:]) for file in written}
    if silent:
        print(f"{', '.join(sorted(silent))} wrote no steps into {folder}: the node's log says why", file=sys.stderr)
    if not written:
        raise ConfigError(f"there are no steps in {folder}")
    return written


def ask_nodes(folder: Path, seconds: float) -> set[str]:
    """Let nodes record for some seconds. Return the names of the nodes that began."""
    asked = folder / ASKED
    marks = () if asked.exists() else folder.glob(RECORDING)  # of killed nodes, unless `baton trace` was killed
    for old in (*folder.glob(STEPS), *marks):
        old.unlink()
    asked.touch()
    try:
        time.sleep(BEGIN_S + seconds)
        return {file.stem for file in folder.glob(RECORDING)}
    finally:
        asked.unlink()


def read_steps(file: Path) -> dict[str, Any]:
    """Return a node's steps. Raise ConfigError for a file that no node has written."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= {"node", "shift", "rows"}:
        raise ConfigError(f"{file} does not hold a node's steps, as NODE.steps.json does")
    return found


def write_trace(file: Path, events: Sequence[dict[str, Any]], folder: Path | None) -> None:
    """`folder`: where the nodes' steps stay, so that they need not be recorded again; None if the user named files."""
    try:
        file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    except OSError as error:
        again = "" if folder is None else f"; the steps are kept: baton trace OTHER_FILE {folder}/{STEPS}"
        raise ConfigError(f"can't write {file}: {error.strerror}{again}") from None


def trace_of(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of all nodes. `nodes`: node, shift (seconds) and rows of shared/node/machine/recording.py."""
    events: list[dict[str, Any]] = []
    stages: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for pid, node in enumerate(sorted(nodes, key=lambda node: str(node["node"])), 1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": node["node"]}})
        rows = [StepRow(*row) for row in node["rows"]]
        slices = [*streams_of(pid, rows), *requests_of(pid, rows)]
        for one in slices:
            one["ts"] += node["shift"] * 1e6
            stages[one["args"]["of"], one["name"]].append(one)
        events += [*names_of(pid, slices), *slices, *arrows_of(slices)]
    for (of, name), senders in stages.items():
        if name == "hand-off":
            for installed in stages.get((of, "install"), []):
                events += arrow("hand-off", senders[0], installed)
    return events


def streams_of(pid: int, rows: Sequence[StepRow]) -> Iterator[dict[str, Any]]:
    for row in rows:
        if row.track in STREAMS:
            yield slice_of(pid, 1 + STREAMS.index(row.track), row)


def requests_of(pid: int, rows: Sequence[StepRow]) -> Iterator[dict[str, Any]]:
    """Stages of one request may overlap others', so each goes to the first lane that is free."""
    free_at: list[float] = []
    for row in sorted((row for row in rows if row.track not in STREAMS), key=lambda row: row.begin):
        lane = next((lane for lane, at in enumerate(free_at) if at <= row.begin), len(free_at))
        free_at[lane : lane + 1] = [row.end]
        yield slice_of(pid, FIRST_REQUEST + lane, row)


def slice_of(pid: int, tid: int, row: StepRow) -> dict[str, Any]:
    times = {"ts": row.begin * 1e6, "dur": max(1.0, (row.end - row.begin) * 1e6)}
    return {"ph": "X", "name": row.name, "cat": row.track, "pid": pid, "tid": tid, "args": {"of": row.of}, **times}


def names_of(pid: int, slices: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for tid in sorted({one["tid"] for one in slices}):
        name = STREAMS[tid - 1] if tid < FIRST_REQUEST else f"requests {tid - FIRST_REQUEST + 1}"
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def arrows_of(slices: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Draw arrows to the slices that wait.

    - publish: to the host that waits for it, else to the next forward, which reads it
    - stash: to the next forward
    - sample: to its copy to the host
    """
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in sorted(slices, key=lambda one: float(one["ts"])):
        by_name[one["name"]].append(one)
    waits = {name: {one["args"]["of"]: one for one in by_name[name]} for name in ("wait for publish", "d2h")}
    begins = [one["ts"] for one in by_name["forward"]]
    for name, waiter in (("publish", "wait for publish"), ("stash", ""), ("sample", "d2h")):
        for one in by_name[name]:
            other = waits.get(waiter, {}).get(one["args"]["of"])
            following = bisect_right(begins, one["ts"])
            if other is None and name != "sample" and following < len(begins):
                other = by_name["forward"][following]
            if other is not None:
                yield from arrow(name, one, other)


def arrow(name: str, source: dict[str, Any], target: dict[str, Any]) -> Iterator[dict[str, Any]]:
    flow = f"{name} {source['pid']} {source['args']['of']}"
    begin = {"ph": "s", "ts": source["ts"], "pid": source["pid"], "tid": source["tid"]}
    at = min(max(source["ts"], target["ts"]), target["ts"] + target["dur"])  # within the target's slice
    end = {"ph": "f", "bp": "e", "ts": at, "pid": target["pid"], "tid": target["tid"]}
    yield from ({"name": name, "cat": "flow", "id": flow, **one} for one in (begin, end))
