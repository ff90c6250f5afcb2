"""Tenants over HTTP: the router process with a keys file, nodes that only pretend, and two clients."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from router.tenants.keys_file import hash_of
from tests.support.clusters.key_folders import write_key
from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S

ALICE, BOB, CAROL, OPERATOR = "alice-key", "bob-key", "carol-key", "0perator"
FILE = f"""
[tenants.alice]
keys = ["{hash_of(ALICE)}"]
requests_per_minute = 1000
tokens_per_minute = 100000

[tenants.bob]
keys = ["{hash_of(BOB)}"]
tokens_per_minute = 60
adapters = []

[tenants.carol]
keys = ["{hash_of(CAROL)}"]
tokens_per_minute = 12
"""
DEADLINE = "x-envoy-expected-rq-timeout-ms"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_key(tmp_path / "keys", FILE)
    write_key(tmp_path / "admin", OPERATOR)
    return tmp_path / "keys"


@pytest.fixture
def router(keys: Path) -> Iterator[RouterProcess]:
    flags = ["--api-key-file", str(keys), "--admin-key-file", str(keys.with_name("admin"))]
    process = RouterProcess(*flags, "--max-open-requests", "4", "--max-queued-requests", "3", api_key=OPERATOR)
    yield process
    assert process.stop() == 0
    assert not [line for line in process.lines if " ERROR " in line]


@pytest.fixture
def node(router: RouterProcess) -> Iterator[FakeNode]:
    node = FakeNode("decode", router.nodes, "d0").start()
    yield node
    node.stop()


def ask(router: RouterProcess, key: str, prompt: str = "x", max_tokens: int = 10, **headers: str) -> httpx.Response:
    return httpx.post(
        router.url + "/v1/completions",
        json={"prompt": prompt, "max_tokens": max_tokens},
        headers={"authorization": f"Bearer {key}"} | headers,
        timeout=HANG_GUARD_S,
    )


def code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def status(router: RouterProcess) -> dict[str, list[dict[str, object]]]:
    headers = {"authorization": f"Bearer {OPERATOR}"}
    found: dict[str, list[dict[str, object]]] = httpx.get(
        router.url + "/admin/status", headers=headers, timeout=HANG_GUARD_S
    ).json()
    return found


def left_of_carol_s(answer: httpx.Response) -> int:
    """Her first request takes all she has; a token comes back only each five seconds, however slow the machine."""
    assert answer.status_code == 200 and answer.headers["x-ratelimit-limit-tokens"] == "12"
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def test_each_tenant_has_its_own_limits(router: RouterProcess, node: FakeNode) -> None:
    assert left_of_carol_s(ask(router, CAROL, "say:a", max_tokens=7)) in (0, 1)
    again = ask(router, CAROL, max_tokens=11)
    assert (again.status_code, code(again)) == (429, "rate_limit_exceeded")
    wait_ms = int(again.headers["retry-after-ms"])
    assert 1000 * (int(again.headers["retry-after"]) - 1) < wait_ms <= 35_000, (
        "5 tokens and 2 were used, the rest is back"
    )
    assert code(ask(router, CAROL, max_tokens=100)) == "above_rate_limit"
    assert ask(router, ALICE, max_tokens=58).status_code == 200
    assert code(ask(router, "nobody")) == "invalid_api_key"
    assert router.metric('baton_tenant_refused_total{code="rate_limit_exceeded",tenant="carol"}') == 1
    rows = {row["tenant"]: row for row in status(router)["limits"]}
    assert set(rows["alice"]) == {"tenant", "requests", "tokens"} and set(rows["carol"]) == {"tenant", "tokens"}


def test_answers_kept_by_a_key_say_what_is_left(router: RouterProcess, node: FakeNode) -> None:
    headers = {"Idempotency-Key": "k"}
    assert left_of_carol_s(ask(router, CAROL, "say:a", max_tokens=7, **headers)) in (0, 1)
    refused = ask(router, CAROL, max_tokens=11, **headers | {"Idempotency-Key": "l"})
    assert refused.status_code == 429 and refused.headers["x-ratelimit-limit-tokens"] == "12"
    again = ask(router, CAROL, "say:a", max_tokens=7, **headers)
    assert again.headers["idempotent-replayed"] == "true"
    assert "x-ratelimit-limit-tokens" not in again.headers, "a repeat costs nothing"


def test_the_file_is_followed_and_a_broken_one_is_not(router: RouterProcess, node: FakeNode, keys: Path) -> None:
    write_key(keys, FILE.replace(hash_of(BOB), hash_of("bob-new")))
    eventually(lambda: ask(router, "bob-new").status_code == 200)
    assert ask(router, BOB).status_code == 401
    write_key(keys, "[tenants.bob]\nkeys")
    eventually(lambda: any("keys stay as they were" in line for line in router.lines))
    assert ask(router, "bob-new").status_code == 200


def test_tenants_don_t_see_the_cluster_and_the_operator_does(router: RouterProcess, node: FakeNode) -> None:
    for key, sees in ((ALICE, 401), (OPERATOR, 200)):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(router.url + "/metrics", headers=headers, timeout=HANG_GUARD_S).status_code == sees
        ready = httpx.get(router.url + "/ready", headers=headers, timeout=HANG_GUARD_S).json()
        assert ready["ready"] and ("nodes" in ready) == (sees == 200)


def test_what_does_not_fit_waits_and_a_lighter_tenant_makes_room(router: RouterProcess, node: FakeNode) -> None:
    node.paused.set()
    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(ask, router, ALICE, max_tokens=100) for _ in range(4)]
        eventually(lambda: node.num_running == 4)
        waiting = [pool.submit(ask, router, ALICE, max_tokens=100) for _ in range(3)]
        eventually(lambda: [row["requests"] for row in status(router)["queue"]] == [3])
        refused = ask(router, ALICE, max_tokens=100)
        assert (refused.status_code, code(refused)) == (503, "queue_full") and "retry-after" in refused.headers
        light = pool.submit(ask, router, BOB, "say:a")
        eventually(lambda: {row["tenant"] for row in status(router)["queue"]} == {"alice", "bob"})
        eventually(lambda: any(one.done() for one in waiting))
        late = pool.submit(ask, router, BOB, "say:a", **{DEADLINE: "50"})
        assert code(late.result(HANG_GUARD_S)) in ("deadline_exceeded", "queue_full")
        node.paused.clear()
        answers = [one.result(HANG_GUARD_S) for one in waiting]
        assert sorted(one.status_code for one in answers) == [200, 503, 503], "each of the lighter one's took a place"
        assert light.result(HANG_GUARD_S).status_code == 200
        assert [one.result(HANG_GUARD_S).status_code for one in running] == [200] * 4
    assert status(router)["queue"] == []


@pytest.mark.parametrize("given", ["soon", "-1", "1.5", "9" * 20])
def test_a_deadline_that_is_no_number_is_the_client_s_fault(given: str, router: RouterProcess, node: FakeNode) -> None:
    answer = ask(router, ALICE, **{DEADLINE: given})
    assert answer.status_code == 400 and DEADLINE in answer.json()["error"]["message"]
