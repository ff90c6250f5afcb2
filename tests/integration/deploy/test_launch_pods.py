"""The chart's pods without a Kubernetes: their shell text on keys as Kubernetes mounts them, and their arguments with
real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.core import launcher
from shared.core.errors import ConfigError
from shared.wire.keys.http_keys import read_key
from shared.wire.keys.keyring import KeyRing, ring_of_node, ring_of_router
from tests.support.clusters.cluster import ROOT
from tests.support.clusters.key_folders import make_keys
from tests.support.house import chart
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.machine.ports import free_port
from tests.support.machine.service_manager import Manager

PODS = ("baton-router", "baton-prefill", "baton-decode")


def pod(name: str) -> dict[str, Any]:
    (found,) = (
        one for one in chart.kept("plain")[1] if one["kind"] == "StatefulSet" and one["metadata"]["name"] == name
    )
    return dict(found["spec"]["template"]["spec"])


def eventually(what: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while not what():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, env=environment or None, stdout=sink, stderr=sink)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def mounted(folder: Path, name: str) -> Path:
    """Secrets as Kubernetes mounts them: in folders that others may enter, as links to what others may read."""
    keys = make_keys(folder / "made", [f"{one}-0" for one in PODS[1:]], [f"{PODS[0]}-0"])
    (folder / "made" / "api.key").write_text("a-key-of-clients")
    (folder / "made" / "admin.key").write_text("a-key-of-operators")
    for into, files in (("all", keys.iterdir()), ("clients", [keys / "api.key"]), ("operators", [keys / "admin.key"])):
        (folder / into).mkdir(mode=0o755)
        for path in files:
            path.chmod(0o644)
            (folder / into / path.name).symlink_to(path)
    return folder


@contextlib.contextmanager
def keys_of(folder: Path, name: str) -> Iterator[Path]:
    """The pod's copying container, with other paths and less sleep; gives its folder /keys."""
    (container,) = pod(name)["initContainers"]
    into = folder / name
    into.mkdir()
    script = container["command"][2]
    places = {"/all/": f"{folder}/all/", "/keys/": f"{into}/", "sleep 15": "sleep 0.1"}
    places |= {f"/{mount}/": f"{folder}/{mount}/" for mount in ("clients", "operators") if name == "baton-router"}
    for old, new in places.items():
        assert old in script
        script = script.replace(old, new)
    command = ["sh", "-c", script]
    with running(command, folder / f"{name}.keys.log", POD_NAME=f"{name}-0", PATH="/usr/bin:/bin") as process:
        eventually((into / "copied").exists, process)
        yield into
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_GUARD_S) == 0, "it would hold the pod up for its whole time to end"


@pytest.mark.parametrize("name", PODS)
def test_keys_as_they_are_mounted_are_taken_and_followed(tmp_path: Path, name: str) -> None:
    mounted(tmp_path, name)
    make_ring: Callable[[str, str], KeyRing | None] = ring_of_router if name == "baton-router" else ring_of_node
    with pytest.raises(ConfigError):
        make_ring(str(tmp_path / "all"), f"{name}-0")
    with keys_of(tmp_path, name) as keys:
        ring = make_ring(str(keys / "own"), f"{name}-0")
        assert ring is not None and ring.name == f"{name}-0"
        assert {path.name for path in (keys / "own").iterdir()} == {"allowed", f"{name}-0.secret"}
        if name == "baton-router":
            assert read_key(str(keys / "http" / "api.key"), "--api-key-file") == "a-key-of-clients"
            assert read_key(str(keys / "http" / "admin.key"), "--admin-key-file") == "a-key-of-operators"
        allowed = tmp_path / "made" / "allowed"
        allowed.write_text("\n".join(allowed.read_text().splitlines() + [f"node new-node {'ab' * 32}\n"]))
        deadline = time.monotonic() + HANG_GUARD_S
        while not ring.refresh():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert ring.is_node("new-node")


def arguments(name: str, keys: Path, changed: dict[str, str]) -> list[str]:
    """The pod's, with this machine's addresses and ports, and a model that loads at once."""
    words = pod(name)["containers"][0]["args"]
    known = {"/keys/": f"{keys}/", "$(POD_NAME)": f"{name}-0", "$(POD_IP)": "127.0.0.1"} | changed
    for old, new in known.items():
        assert any(old in word for word in words), old
        words = [word.replace(old, new) for word in words]
    return launcher.command("deploy.cli", *words, "--model=hashlm")


def asks(port: int, path: str, **headers: str) -> int:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, timeout=HANG_GUARD_S).status_code
    return 0


def test_the_pods_arguments_make_a_cluster_that_answers(tmp_path: Path) -> None:
    """Under systemd, both would be ready, alive and stopping in its eyes."""
    mounted(tmp_path, "baton-router")
    http, nodes, ready = free_port(), free_port(), free_port()
    managers = {name: Manager(str(tmp_path / name)) for name in ("router.notify", "node.notify")}
    watched = [os.environ | {"NOTIFY_SOCKET": one.address, "WATCHDOG_USEC": "30000000"} for one in managers.values()]
    bearer = {"Authorization": "Bearer a-key-of-clients"}
    here = {"dns://baton-inside.baton.svc:7001": f"dns://localhost:{nodes}", "=7002": "=0"}
    with contextlib.ExitStack() as stack:
        router_keys, node_keys = (stack.enter_context(keys_of(tmp_path, name)) for name in (PODS[0], PODS[2]))
        serve = [*arguments(PODS[0], router_keys, {":7001": f":{nodes}"}), f"--port={http}"]
        router = stack.enter_context(running(serve, tmp_path / "router.log", **watched[0]))
        compute = arguments(PODS[2], node_keys, here | {"=8081": f"={ready}"})
        node = stack.enter_context(running(compute, tmp_path / "node.log", **watched[1]))
        eventually(lambda: asks(ready, "/ready") == 200, node)
        eventually(lambda: asks(http, "/ready") == 200, router)
        assert asks(ready, "/live") == 200 and asks(http, "/v1/models") == 401
        body = {"model": "hashlm", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{http}/v1/completions", json=body, headers=bearer, timeout=HANG_GUARD_S)
        assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
        node.send_signal(signal.SIGTERM)
        assert node.wait(HANG_GUARD_S) == 0, (tmp_path / "node.log").read_text()
        router.send_signal(signal.SIGTERM)
        assert router.wait(HANG_GUARD_S) == 0, (tmp_path / "router.log").read_text()
    for manager in managers.values():
        heard = [line for message in manager.heard() for line in message]
        assert heard[:3] == ["READY=1", "WATCHDOG_USEC=30000000", "WATCHDOG=1"]
        assert [line for line in heard[3:] if line != "WATCHDOG=1"] == ["STOPPING=1", "WATCHDOG_USEC=0"]
        manager.close()
