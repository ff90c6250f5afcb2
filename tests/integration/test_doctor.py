"""`baton doctor` on real clusters: one where all is well, and one whose nodes are no pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster import ROOT, baton_up

LOCAL = ("cpu", "memory", "disk", "files", "keys")  # of the machine that tests run on: may be as they like


def doctor(url: str, *words: str) -> tuple[int, list[dict[str, Any]]]:
    argv = ["-m", "deploy.cli", "doctor", "--url", url, "--interval", "1.5", "--json", *words]
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


def test_a_cluster_where_all_is_well(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a-key-for-tests")
    with baton_up(tmp_path / "up.log", "--model", "hashlm", "--admin-key-file", str(key)) as cluster:
        status, found = doctor(cluster.url, "--admin-key-file", str(key))
        key.write_text("another-key")
        _, without = doctor(cluster.url, "--admin-key-file", str(key))
    of_cluster = [one for one in found if one["check"] not in LOCAL]
    assert [one for one in of_cluster if one["level"] != "ok" and one["check"] != "ports"] == []
    assert not any(one["level"] == "broken" for one in of_cluster)  # a busy machine may be slow to answer
    checks = {one["check"] for one in of_cluster}
    assert checks == {"nodes", "pairs", "transports", "leaks", "counters", "hand-offs", "clocks", "ports"}
    assert sum(one["check"] == "ports" for one in of_cluster) == 3  # router, prefill node, decode node
    assert status == any(one["level"] == "broken" for one in found)
    assert any(one["check"] == "nodes" and "401" in one["what"] for one in without)


def test_nodes_that_are_no_pair(tmp_path: Path) -> None:
    """`baton up` starts fitting nodes only, so the second prefill node is started by hand, with other pages."""
    key = tmp_path / "key"
    key.write_text("a-key-for-tests")
    flags = ("--model", "hashlm", "--prefill", "0", "--admin-key-file", str(key))
    with baton_up(tmp_path / "up.log", *flags) as cluster:
        _, found = doctor(cluster.url, "--admin-key-file", str(key))
        assert any(one["level"] == "look" and "one role only" in one["what"] for one in found)
        endpoint = next(one["where"].split()[1] for one in found if one["where"].startswith("router tcp"))
        argv = ["prefill", "--model", "hashlm", "--page-size", "32", "--node-id", "other", "--router", endpoint]
        with subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", *argv], cwd=ROOT, stderr=subprocess.DEVNULL
        ) as other:
            try:
                cluster.eventually(lambda: "other" in str(cluster.metrics()), "the other node is here")
                status, found = doctor(cluster.url, "--admin-key-file", str(key))
            finally:
                other.terminate()
    assert status == 1
    apart, layout = (one for one in found if one["check"] == "pairs")
    assert (apart["level"], apart["where"]) == (layout["level"], layout["where"]) == ("broken", "decode-0, other")
    assert layout["what"].startswith("page_layout: ")
    assert "16 on decode-0" in apart["what"] and "32 on other" in apart["what"] and "--page-size" in apart["advice"]
