"""A router with other settings than the default: a model of several names, strict fields, no placeholders."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess
from tests.support.machine.patience import HANG_GUARD_S

NAMES = ["one", "two"]


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    router = RouterProcess(
        *(f"--served-model-name={name}" for name in NAMES), "--strict-fields", "--unsupported-parts=refuse"
    )
    node = FakeNode("decode", router.nodes, "d0").start()
    yield router
    node.stop()
    assert router.stop() == 0


def ask(router: RouterProcess, **body: object) -> httpx.Response:
    return httpx.post(f"{router.url}/v1/completions", json={"prompt": "say:a"} | body, timeout=HANG_GUARD_S)


def test_each_name_is_listed_answered_with_and_counted(router: RouterProcess) -> None:
    cards = httpx.get(f"{router.url}/v1/models", timeout=HANG_GUARD_S).json()["data"]
    assert [card["id"] for card in cards] == NAMES
    for name, num in (("one", 1), ("two", 2)):
        assert httpx.get(f"{router.url}/v1/models/{name}", timeout=HANG_GUARD_S).json()["id"] == name
        for _ in range(num):
            assert ask(router, model=name).json()["model"] == name
    assert ask(router).json()["model"] == "one"
    for name, num in (("one", 2), ("two", 2)):
        assert router.metric(f'baton_model_requests_total{{model="{name}"}}') == num


def test_an_unknown_name_gets_the_list_and_no_count(router: RouterProcess) -> None:
    card = httpx.get(f"{router.url}/v1/models/gpt-9", timeout=HANG_GUARD_S)
    for missing in (card, ask(router, model="gpt-9")):
        assert missing.status_code == 404 and "'one', 'two' are served" in missing.json()["error"]["message"]
    assert "gpt-9" not in httpx.get(f"{router.url}/metrics", timeout=HANG_GUARD_S).text


def test_a_strict_router_changes_no_limit(router: RouterProcess) -> None:
    refused = ask(router, model="one", max_tokens=32_000)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert "x-baton-lowered" not in refused.headers


def test_a_router_without_placeholders_refuses_every_image(router: RouterProcess) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    turns = [{"role": "user", "content": [image]}, {"role": "assistant", "content": "ok"}]
    body = {"messages": [*turns, {"role": "user", "content": "hi"}], "max_tokens": 3}
    refused = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=HANG_GUARD_S)
    assert refused.status_code == 400 and "reads text only" in refused.json()["error"]["message"]
