"""The shell texts of the Kubernetes manifests, run as they stand there: against a real cluster behind a TLS proxy, and
on keys as Kubernetes mounts them."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shared.core import launcher
from shared.core.errors import ConfigError
from shared.wire.http_keys import read_key
from shared.wire.keyring import ring_of_node, ring_of_router
from tests.support.cluster import ROOT, baton_up
from tests.support.key_folders import make_keys, write_key
from tests.support.launch_lines import LAUNCH, documents
from tests.support.patience import HANG_GUARD_S
from tests.support.tcp_relay import make_certificate, tls_proxy


def pod(name: str) -> dict[str, Any]:
    found = next(one for one in documents(LAUNCH / "kubernetes" / name) if one["kind"] in ("StatefulSet", "Deployment"))
    return dict(found["spec"]["template"]["spec"])


def run(folder: Path, script: str, replaced: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
    """With other paths and addresses, nothing else; `baton` is this tree's."""
    for old, new in replaced.items():
        assert old in script
        script = script.replace(old, new)
    own = folder / "bin"
    own.mkdir(exist_ok=True)
    (own / "baton").write_text(f'#!/bin/sh\nexec {shlex.join(launcher.command("deploy.cli"))} "$@"\n')
    (own / "baton").chmod(0o755)
    given = {**os.environ, "PATH": f"{own}:{os.environ['PATH']}", **environment}
    return subprocess.run(
        ["sh", "-c", script], cwd=ROOT, env=given, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False
    )


def paths(folder: Path, url: str) -> dict[str, str]:
    return {
        "https://baton-inside:8444": url,
        "/operator-tls/ca.crt": str(folder / "tls.crt"),
        "/admin/admin.key": str(folder / "mounted.key"),
        "/keys/admin.key": str(folder / "own.key"),
    }


def test_a_pod_starts_once_listed_and_drains_before_it_stops(tmp_path: Path) -> None:
    write_key(tmp_path / "key", "a-key-for-tests")
    (tmp_path / "mounted.key").write_text("a-key-for-tests")
    (tmp_path / "mounted.key").chmod(0o644)
    certificate, key = make_certificate(tmp_path)
    (node,) = pod("decode.yaml")["containers"]
    probe = node["startupProbe"]["exec"]["command"][2]
    stop = node["lifecycle"]["preStop"]["exec"]["command"][2]
    flags = ("--model", "hashlm", "--decode", "2", "--admin-key-file", str(tmp_path / "key"))
    with (
        baton_up(tmp_path / "up.log", *flags) as cluster,
        tls_proxy(cluster.port, certificate, key) as url,
    ):
        known = paths(tmp_path, url)
        assert run(tmp_path, probe, known, POD_NAME="decode-1").returncode == 0
        assert run(tmp_path, probe, known, POD_NAME="decode-7").returncode == 1
        done = run(tmp_path, stop, known, POD_NAME="decode-1")
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "decode-1: gone"), done.stderr
        assert run(tmp_path, probe, known, POD_NAME="decode-1").returncode == 1
        strange = known | {"/operator-tls/ca.crt": "/dev/null"}
        assert "--ca" in run(tmp_path, stop, strange, POD_NAME="decode-0").stderr
        unknown = run(tmp_path, probe.replace("--ca /operator-tls/ca.crt", ""), {
            name: new for name, new in known.items() if "tls" not in name
        }, POD_NAME="decode-0")  # fmt: skip
        assert unknown.returncode == 1 and "certificate" in unknown.stderr


@pytest.mark.parametrize(("name", "own"), [("prefill.yaml", "p"), ("decode.yaml", "d"), ("router.yaml", "router")])
def test_keys_as_they_are_mounted_become_keys_that_are_taken(tmp_path: Path, name: str, own: str) -> None:
    """Mounted secrets lie in a folder that others may enter, and as links."""
    whole = make_keys(tmp_path / "made")
    mounted, into = tmp_path / "all", tmp_path / "keys"
    mounted.mkdir(mode=0o755)
    into.mkdir(mode=0o777)
    for path in whole.iterdir():
        (mounted / path.name).symlink_to(path)
        path.chmod(0o644)
    make_ring = ring_of_router if own == "router" else ring_of_node
    with pytest.raises(ConfigError):
        make_ring(str(mounted), own)
    init = pod(name)["initContainers"][0]
    done = run(tmp_path, init["command"][2], {"/all/": f"{mounted}/", "/keys/own": f"{into}/own"}, POD_NAME=own)
    assert done.returncode == 0, done.stderr
    ring = make_ring(str(into / "own"), own)
    assert ring is not None and ring.name == own
    assert {path.name for path in (into / "own").iterdir()} == {"allowed", f"{own}.secret"}


def test_mounted_client_and_operator_keys_become_accepted_ones(tmp_path: Path) -> None:
    for name in ("client/api.key", "admin/admin.key"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("a-key-for-tests")
        (tmp_path / name).chmod(0o644)
    init = pod("router.yaml")["initContainers"][1]
    places = {"/client/": f"{tmp_path}/client/", "/admin/": f"{tmp_path}/admin/", "/keys/http": f"{tmp_path}/http"}
    done = run(tmp_path, init["command"][2], places)
    assert done.returncode == 0, done.stderr
    (router, _) = pod("router.yaml")["containers"]
    for use in ("api", "admin"):
        assert f"--{use}-key-file=/keys/http/{use}.key" in router["args"]
        assert read_key(str(tmp_path / "http" / f"{use}.key"), "--api-key-file") == "a-key-for-tests"
