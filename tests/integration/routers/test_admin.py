"""Nodes drained, restarted and turned into the other kind while clients stream: no request may fail or change."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from router.tenants.keys_file import hash_of
from shared.core import launcher
from tests.support.clusters.cluster import ROOT, Cluster, baton_up
from tests.support.clusters.key_folders import write_key
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.mixed_clients import Client, make_client, stream_all, wait_until

KEY = "a-key-for-tests"
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("admin")
    write_key(folder / "key", KEY)
    flags = ("--model", "hashlm", "--heartbeat-s", "0.1", "--decode", "2", "--admin-key-file", str(folder / "key"))
    with baton_up(folder / "up.log", *flags) as cluster:
        yield cluster


async def baton_admin(cluster: Cluster, *words: str) -> str:
    """As a user types it; gives what it printed."""
    key_file = cluster.log_path.with_name("key")
    argv = launcher.command("deploy.cli", "admin", "--url", cluster.url, "--admin-key-file", str(key_file), *words)
    process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, _ = await asyncio.wait_for(process.communicate(), HANG_GUARD_S)
    assert process.returncode == 0, printed.decode()
    return printed.decode()


def status(cluster: Cluster) -> dict[str, tuple[str, str]]:
    answer = httpx.get(cluster.url + "/admin/status", headers=HEADERS, timeout=HANG_GUARD_S)
    return {node["node"]: (node["role"], node["state"]) for node in answer.json()["nodes"]}


def under_load(cluster: Cluster, command: tuple[str, ...]) -> None:
    """Runs the command while eight users stream one request after another, the first of them long."""
    clients: list[Client] = []
    is_over = asyncio.Event()

    async def user(number: int) -> None:
        for round_ in range(1000):
            clients.append(make_client(number + 8 * round_, 60 if round_ else 300))
            await stream_all(cluster.url, [clients[-1]])
            if is_over.is_set():
                return

    async def move() -> None:
        await wait_until(lambda: len(clients) == 8 and all(client.num_tokens >= 5 for client in clients))
        await baton_admin(cluster, *command)
        is_over.set()

    async def all_of_it() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(user(number))
            tasks.create_task(move())

    asyncio.run(all_of_it())
    for client in clients:
        client.check()
    cluster.eventually(cluster.at_rest, "all pages and rows are back")


def test_roles_change_and_change_back_under_load(cluster: Cluster) -> None:
    pid = cluster.node_pid("--node-id=decode-1")
    under_load(cluster, ("role", "decode-1", "prefill"))
    assert status(cluster)["decode-1"] == ("prefill", "ready")
    assert cluster.node_pid("--node-id=decode-1") == pid  # the same process: its supervisor need not know
    under_load(cluster, ("role", "decode-1", "decode", "--move-after", "0"))
    assert status(cluster)["decode-1"] == ("decode", "ready")


@pytest.mark.long
def test_a_rolling_restart_under_load(cluster: Cluster) -> None:
    before = status(cluster)
    under_load(cluster, ("restart", "--all", "--move-after", "0.3"))
    assert status(cluster) == before


def test_a_drained_node_stays_down(cluster: Cluster) -> None:
    under_load(cluster, ("drain", "prefill-0"))
    assert "prefill-0" not in status(cluster)
    stays_down = "prefill-0 was drained and stays down"  # the supervisor notices after the router did
    cluster.eventually(lambda: stays_down in cluster.log_path.read_text(), stays_down)
    assert cluster.process.poll() is None


def test_an_answer_is_aborted_by_its_id(cluster: Cluster) -> None:
    body = {"model": "hashlm", "prompt": "x" * 50, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", cluster.url + "/v1/completions", json=body, timeout=HANG_GUARD_S) as response:
        events = (line[6:] for line in response.iter_lines() if line.startswith("data: {"))
        answer_id = json.loads(next(events))["id"]
        asyncio.run(baton_admin(cluster, "abort", answer_id))
        *_, last = events
    assert json.loads(last)["error"]["code"] == "aborted"
    cluster.eventually(cluster.at_rest, "all pages and rows are back")
    answer = httpx.post(
        cluster.url + "/admin/abort",
        json={"id": answer_id},
        headers=HEADERS,
        timeout=HANG_GUARD_S,
    )
    assert answer.status_code == 404


def test_what_admin_refuses(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, headers=HEADERS, timeout=HANG_GUARD_S) as http:
        assert http.post("/admin/drain", json={"node": "nobody"}).status_code == 404
        assert http.post("/admin/role", json={"node": "decode-0", "role": "decode"}).status_code == 400
        assert http.post("/admin/role", json={"node": "decode-0", "role": "cook"}).status_code == 400
        assert http.post("/admin/drain", json={"node": "decode-0", "sudo": True}).status_code == 400
        assert http.get("/admin/drain").status_code == 405
        for wrong in ({"authorization": "Bearer nope"}, {"authorization": ""}):
            for path, body in (("/admin/drain", {"node": "decode-0"}), ("/admin/status", None)):
                assert http.request("POST" if body else "GET", path, json=body, headers=wrong).status_code == 401
    assert status(cluster)["decode-0"] == ("decode", "ready")


@pytest.mark.parametrize(("flags", "expected"), [((), 403), (("--admin-without-key",), 200)])
def test_admin_is_off_until_it_has_a_key(flags: tuple[str, ...], expected: int) -> None:
    router = RouterProcess(*flags)
    try:
        assert httpx.get(router.url + "/admin/status", timeout=HANG_GUARD_S).status_code == expected
        assert httpx.post(router.url + "/admin/drain", json={"node": "d"}, timeout=HANG_GUARD_S).status_code == (
            403 if expected == 403 else 404
        )
        assert httpx.get(router.url + "/health", timeout=HANG_GUARD_S).status_code == 200
    finally:
        assert router.stop() == 0


def test_a_call_s_address_and_rights_are_no_claims_of_its_client(tmp_path: Path) -> None:
    file = tmp_path / "admins.toml"
    write_key(file, f'[admins.shift]\nkeys = ["{hash_of("shift")}"]\nrights = ["drain"]\n')
    router = RouterProcess("--admin-key-file", str(file))
    try:
        headers = {"authorization": "Bearer shift", "x-forwarded-for": "192.0.2.7"}
        with httpx.Client(base_url=router.url, headers=headers, timeout=HANG_GUARD_S) as http:
            assert http.post("/admin/drain", json={"node": "d"}).status_code == 404
            forced = http.post("/admin/drain", json={"node": "d", "force": True})
        assert forced.status_code == 403 and forced.json()["error"]["code"] == "missing_right"
        told = "admin call key=shift address=127.0.0.1"
        eventually(lambda: len([line for line in router.lines if told in line and "=192.0.2.7" in line]) == 2)
    finally:
        assert router.stop() == 0


def test_the_last_node_leaves_only_by_force(cluster: Cluster) -> None:
    asyncio.run(baton_admin(cluster, "drain", "decode-0"))
    answer = httpx.post(
        cluster.url + "/admin/drain",
        json={"node": "decode-1"},
        headers=HEADERS,
        timeout=HANG_GUARD_S,
    )
    assert answer.status_code == 409 and "last node" in answer.json()["error"]["message"]
    assert status(cluster) == {"decode-1": ("decode", "ready")}
