"""Nodes of several pipeline stages as real processes: streams are the oracle's, whatever the other node has."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import httpx
import pytest

from shared.core import launcher
from tests.support.clusters.cluster import ROOT, Cluster, baton_up
from tests.support.clusters.metrics_page import total
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.mixed_clients import make_client, stream_all

FLAGS = ("--model", "hashlm", "--heartbeat-s", "0.1")


@pytest.mark.parametrize(
    "flags",
    [
        ("--pp", "2"),
        ("--pp", "2", "--decode-pp", "1", "--spec", "eagle"),
        ("--decode-pp", "2", "--transport", "zmq", "--spec", "ngram", "--max-running", "6"),
    ],
    ids=" ".join,
)
def test_streams_of_any_pair_are_the_oracles(flags: tuple[str, ...], tmp_path: Path) -> None:
    with baton_up(tmp_path / "up.log", *FLAGS, *flags) as cluster:
        clients = [make_client(index, 60) for index in range(12)]
        asyncio.run(stream_all(cluster.url, clients))
        for client in clients:
            client.check()
        assert total(cluster.metrics(), "baton_handoff_bytes_total") > 0
        check_json(cluster, is_enforced=flags != ("--pp", "2"))
        cluster.eventually(cluster.at_rest, "all pages and rows are back")
        assert cluster.pages_partition()
        said = cluster.log_path.read_text()
        wanted = {"--pp": 2, "--decode-pp": 2}
        assert any(f"stages={wanted[flag]}" in said for flag in flags if flag in wanted)


def check_json(cluster: Cluster, *, is_enforced: bool) -> None:
    """Stages follow no grammars; a node without them, of either role, computes such requests alone."""
    body = {"prompt": "a" * 60, "max_tokens": 30, "response_format": {"type": "json_object"}}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-baton-unenforced") == (None if is_enforced else "json;valid=no")
    assert answer.json()["choices"][0]["text"].startswith("{") == is_enforced


def test_a_node_with_more_stages_than_layers_does_not_start() -> None:
    flags = ("--router", "tcp://127.0.0.1:1", "--model", "hashlm", "--pp", "3")
    command = launcher.command("deploy.cli", "decode", *flags)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)
    assert ended.returncode != 0
    assert "--pp 3: hashlm has 2 layers" in ended.stderr and "Traceback" not in ended.stderr
