"""`baton doctor` on real clusters: one where all is well, one whose nodes are no pair, one with everything wrong."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec

from shared.core import launcher
from tests.support.clusters.cluster import ROOT, baton_up
from tests.support.clusters.key_folders import write_key
from tests.support.clusters.router_fake_node import FINGERPRINT, FakeNode
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S, SILENCE_S

OF_CLUSTER = {"nodes", "routers", "pairs", "reach", "transports", "leaks", "counters", "hand-offs", "clocks", "ports"}
LOCAL = ("cpu", "memory", "disk", "files", "keys")  # of the machine that tests run on: may be as they like


def doctor(url: str, *words: str) -> tuple[int, list[dict[str, Any]]]:
    argv = launcher.command("deploy.cli", "doctor", "--url", url, "--interval", "1.5", "--json", *words)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


def test_a_cluster_where_all_is_well(tmp_path: Path) -> None:
    key = tmp_path / "key"
    write_key(key, "a-key-for-tests")
    with baton_up(tmp_path / "up.log", "--model", "hashlm", "--admin-key-file", str(key)) as cluster:
        status, found = doctor(cluster.url, "--admin-key-file", str(key))
        another = tmp_path / "another"  # the router follows its own file
        write_key(another, "another-key")
        _, without = doctor(cluster.url, "--admin-key-file", str(another))
    of_cluster = [one for one in found if one["check"] not in LOCAL]
    assert [one for one in of_cluster if one["level"] != "ok" and one["check"] != "ports"] == []
    assert not any(one["level"] == "broken" for one in of_cluster)  # a busy machine may be slow to answer
    checks = {one["check"] for one in of_cluster}
    assert checks == OF_CLUSTER
    assert sum(one["check"] == "ports" for one in of_cluster) == 3  # router, prefill node, decode node
    assert status == any(one["level"] == "broken" for one in found)
    assert any(one["check"] == "nodes" and "401" in one["what"] for one in without)


def test_nodes_that_are_no_pair(tmp_path: Path) -> None:
    """`baton up` starts fitting nodes only, so the second prefill node is started by hand, with other pages."""
    key = tmp_path / "key"
    write_key(key, "a-key-for-tests")
    flags = ("--model", "hashlm", "--prefill", "0", "--admin-key-file", str(key))
    with baton_up(tmp_path / "up.log", *flags) as cluster:
        _, found = doctor(cluster.url, "--admin-key-file", str(key))
        assert any(one["level"] == "look" and "one role only" in one["what"] for one in found)
        endpoint = next(one["where"].split()[1] for one in found if one["where"].startswith("router tcp"))
        argv = ["prefill", "--model", "hashlm", "--page-size", "32", "--node-id", "other", "--router", endpoint]
        with subprocess.Popen(launcher.command("deploy.cli", *argv), cwd=ROOT, stderr=subprocess.DEVNULL) as other:
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


def test_what_is_wrong_with_nodes_is_found_behind_a_real_router() -> None:
    """Both hold pages that nobody uses; one has a clock ahead and another dtype, one does not speak any more."""
    router = RouterProcess("--admin-without-key", "--node-silence-s", str(SILENCE_S))
    ahead = int((time.time() + 30.0) * 1e6)
    other = msgspec.structs.replace(FINGERPRINT, dtype="float32")
    nodes = [
        FakeNode("prefill", router.nodes, "p", epoch=ahead, fingerprint=other).start(),
        FakeNode("decode", router.nodes, "d", epoch=int(time.time() * 1e6)).start(),
    ]
    try:
        status, found = doctor(router.url)
        nodes[1].frozen.set()
        eventually(lambda: any("fallen silent" in line for line in router.lines))
        _, later = doctor(router.url)
    finally:
        for node in nodes:
            node.stop()
        router.stop()
    worse = {(one["check"], one["where"], one["level"]) for one in found if one["check"] not in LOCAL}
    assert {("leaks", "p", "broken"), ("leaks", "d", "broken"), ("pairs", "d, p", "broken"),
            ("clocks", "p", "look")} <= worse  # fmt: skip
    leaks = [one["what"] for one in found if one["check"] == "leaks" and one["level"] == "broken"]
    assert status == 1 and len(leaks) == 2 and all("20 pages active" in text for text in leaks)
    assert any("float32 on p" in one["what"] for one in found)
    assert any(one["where"] == "d" and "silent for" in one["what"] for one in later)
