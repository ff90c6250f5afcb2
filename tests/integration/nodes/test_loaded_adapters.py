"""Adapters come to a running cluster and leave it, under load: streams are those of a cluster that began with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.core import launcher
from tests.support.clusters.cluster import ROOT, Cluster, baton_up
from tests.support.clusters.key_folders import write_key
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.tiny_adapters import adapter
from tests.support.models.tiny_llama import VOCAB, write_tiny_llama
from tests.support.web.hub_rig import write_tokenizer

KEY = "a-key-for-tests"
HEADERS = {"authorization": f"Bearer {KEY}"}
PROMPT = [(7 * i + 3) % VOCAB for i in range(48)]
LENGTH, LONG = 12, 400
BASE = "llama"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_tokenizer(write_tiny_llama(folder / BASE))
    (folder / "loras").mkdir()
    for seed, name in enumerate(("v1", "v2"), start=1):
        adapter(folder / BASE, folder / "loras" / name, seed)
    write_key(folder / "key", KEY)
    return folder


def flags(folder: Path) -> tuple[str, ...]:
    return ("--model", str(folder / BASE), "--dtype", "float32", "--kv-bytes", "16MiB", "--heartbeat-s", "0.1")


@pytest.fixture(scope="module")
def known(folder: Path) -> dict[str, list[int]]:
    """The streams of a cluster that began with the adapters."""
    loras = [word for name in ("v1", "v2") for word in ("--lora", f"{name}={folder}/loras/{name}")]
    with baton_up(folder / "began.log", *flags(folder), *loras) as cluster:
        return {model: stream(cluster, model, LONG) for model in (BASE, "v1", "v2")}


@pytest.fixture
def cluster(folder: Path, known: dict[str, list[int]]) -> Iterator[Cluster]:
    more = ("--decode", "2", "--lora-dir", str(folder / "loras"), "--admin-key-file", str(folder / "key"))
    with baton_up(folder / "up.log", *flags(folder), *more) as cluster:
        yield cluster


def stream(cluster: Cluster, model: str, length: int, begun: threading.Event | None = None) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    ids: list[int] = []
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                ids += event["choices"][0].get("token_ids") or []
                if begun is not None and len(ids) >= 5:
                    begun.set()
    assert len(ids) == length
    return ids


def baton_admin(cluster: Cluster, *words: str, status: int = 0) -> str:
    key_file = str(cluster.log_path.with_name("key"))
    argv = launcher.command(
        "deploy.cli", "admin", "--url", cluster.url, "--admin-key-file", key_file, "adapters", *words
    )
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def models(cluster: Cluster) -> list[str]:
    cards = httpx.get(f"{cluster.url}/v1/models", timeout=HANG_GUARD_S).json()["data"]
    return [card["id"] for card in cards]


def shown(cluster: Cluster) -> dict[str, Any]:
    answer = httpx.get(f"{cluster.url}/admin/adapters", headers=HEADERS, timeout=HANG_GUARD_S).json()
    return {node["node"]: node["adapters"] for node in answer["nodes"]}


class Load:
    """Streams of the base model, one after another, until the end."""

    def __init__(self, cluster: Cluster) -> None:
        self.streams: list[list[int]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(cluster,))
        self._thread.start()

    def _run(self, cluster: Cluster) -> None:
        while not self._is_over.is_set():
            self.streams.append(stream(cluster, BASE, LENGTH))

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(HANG_GUARD_S)


def test_adapters_come_and_go_under_load(cluster: Cluster, folder: Path, known: dict[str, list[int]]) -> None:
    load = Load(cluster)
    try:
        for path in ("../llama", str(folder / "loras" / "v1"), "v9"):
            answer = httpx.post(
                f"{cluster.url}/admin/adapters",
                json={"name": "sql", "path": path},
                headers=HEADERS,
                timeout=HANG_GUARD_S,
            )
            assert answer.status_code == 409 and "decode-1 refuses" in answer.text, answer.text
        comes_and_goes(cluster, known)
        comes_back_changed(cluster, known)
        outlives_a_node(cluster, folder, known)
    finally:
        load.end()
    assert load.streams and all(ids == known[BASE][:LENGTH] for ids in load.streams)
    cluster.eventually(cluster.at_rest, "all pages and rows are back")


def comes_and_goes(cluster: Cluster, known: dict[str, list[int]]) -> None:
    """It is removed under a stream, which ends well while no other may begin."""
    assert models(cluster) == [BASE]
    assert baton_admin(cluster, "load", "sql", "--path", "v1").count(": loaded ") == 3
    assert models(cluster) == [BASE, "sql"]
    assert stream(cluster, "sql", LENGTH) == known["v1"][:LENGTH]
    begun, long = threading.Event(), list[list[int]]()
    thread = threading.Thread(target=lambda: long.append(stream(cluster, "sql", LONG, begun)))
    thread.start()
    assert begun.wait(HANG_GUARD_S)
    answer = httpx.delete(f"{cluster.url}/admin/adapters/sql", headers=HEADERS, timeout=HANG_GUARD_S)
    assert answer.status_code == 202 and "leaving" in answer.text, "the stream ended before the removal: lengthen it"
    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 1}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S).status_code == 404
    assert models(cluster) == [BASE]
    thread.join(HANG_GUARD_S)
    assert long == [known["v1"]]


def comes_back_changed(cluster: Cluster, known: dict[str, list[int]]) -> None:
    """Other weights under the name never meet the old ones' pages."""
    baton_admin(cluster, "load", "sql", "--path", "v2")
    assert stream(cluster, "sql", LENGTH) == known["v2"][:LENGTH] != known["v1"][:LENGTH]
    assert "other weights" in baton_admin(cluster, "load", "sql", "--path", "v1", status=2)


def outlives_a_node(cluster: Cluster, folder: Path, known: dict[str, list[int]]) -> None:
    """A node that comes back lacks the adapter: it gets no requests for it until it is told again."""
    killed = cluster.node_pid("--node-id=decode-1")
    os.kill(killed, signal.SIGKILL)
    cluster.eventually(lambda: shown(cluster).get("decode-1") == {}, "the node is back, without the adapter")
    assert set(shown(cluster)["decode-0"]) == {"sql"}
    for _ in range(4):
        assert stream(cluster, "sql", LENGTH) == known["v2"][:LENGTH]
    (folder / "loras" / "v2").rename(folder / "away")
    assert "decode-1 refuses" in baton_admin(cluster, "load", "sql", "--path", "v2", status=2)
    assert stream(cluster, "sql", LENGTH) == known["v2"][:LENGTH], "nodes that have it keep it"
    (folder / "away").rename(folder / "loras" / "v2")
    baton_admin(cluster, "load", "sql", "--path", "v2")
    assert "on decode-0, decode-1, prefill-0" in baton_admin(cluster, "list")
    assert baton_admin(cluster, "remove", "sql").count(": removed") == 3
