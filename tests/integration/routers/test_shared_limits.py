"""Two router processes and a real node: what one charges a tenant, the other charges, too.

How much is left depends on the clock, so tests/simulation/test_spending.py looks at that.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import httpx

from router.tenants.keys_file import hash_of
from tests.support.clusters.chaos_cluster import Endpoint
from tests.support.clusters.key_folders import write_key
from tests.support.clusters.procs import NodeProcess
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S

BOB, OPERATOR = "bob-key", "0perator"
FILE = f'stream_secret = "s"\n[tenants.bob]\nkeys = ["{hash_of(BOB)}"]\ntokens_per_minute = 60\n'


def ask(router: RouterProcess, max_tokens: int) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"authorization": f"Bearer {BOB}"}
    return httpx.post(f"{router.url}/v1/completions", json=body, headers=headers, timeout=HANG_GUARD_S)


def charged(router: RouterProcess) -> list[str]:
    headers = {"authorization": f"Bearer {OPERATOR}"}
    rows = httpx.get(f"{router.url}/admin/status", headers=headers, timeout=HANG_GUARD_S).json()["limits"]
    return [row["tenant"] for row in rows]


def is_ready(router: RouterProcess) -> bool:
    return httpx.get(f"{router.url}/ready", timeout=HANG_GUARD_S).status_code == 200


def test_two_routers_have_one_limit(tmp_path: Path) -> None:
    write_key(tmp_path / "keys", FILE)
    write_key(tmp_path / "admin", OPERATOR)
    flags = [f"--parent-pid={os.getpid()}", "--api-key-file", str(tmp_path / "keys")]
    flags += ["--admin-key-file", str(tmp_path / "admin")]
    with contextlib.ExitStack() as stack:
        routers = []
        for index in range(2):
            routers.append(RouterProcess(*flags, "--router-id", f"router-{index}", api_key=OPERATOR))
            stack.callback(routers[-1].stop)
        first, second = routers
        node = NodeProcess("decode", "d0", Endpoint(first.nodes), tmp_path, "--router", second.nodes)  # type: ignore[arg-type]
        stack.callback(node.close)
        eventually(lambda: is_ready(first) and is_ready(second))
        assert ask(first, 50).status_code == 200
        eventually(lambda: charged(second) == ["bob"])
        assert not [line for router in routers for line in router.lines if "not signed" in line]
