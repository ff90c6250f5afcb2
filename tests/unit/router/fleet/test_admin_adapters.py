"""/admin/adapters at one router: orders to every node, and an answer for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from router.api.admin.admin_adapters import AdapterAdmin, Order
from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.ask.resolve import Resolver
from router.api.openai.completions import CompletionRequest, Completions
from router.fleet.registry import RegisteredNode
from router.http.errors import AdminIsOff, Conflict, NotFound
from router.requests.new_request import NewRequest
from router.text.hashlm import hash_text_model
from shared.config.settings.settings import LimitsConfig, ModelConfig
from shared.core.errors import AdapterMissing, BatonError, ConfigError, InvalidRequest, ModelNotFound, NoNodes
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import PROTOCOL_VERSION, Adapter, AdapterOrder, LoadAdapter, RemoveAdapter
from shared.wire.peers import peer_name
from shared.wire.versions import SINCE
from tests.support.worlds.router_rig import FINGERPRINT, RouterRig, failures, generates, hello, load

Answer = tuple[int, dict[str, Any]]
Says = Callable[[Order, int], AdapterOrder | None]  # an order, and how often the node got it


class Asked:
    """A Connection and its body."""

    def __init__(self, method: str, body: object = None, **params: str) -> None:
        self.scope = {"method": method, "path_params": params}
        self.data = b"" if body is None else msgspec.json.encode(body)
        self.answers: list[Answer] = []
        self.body = self

    async def read(self, limit: int) -> bytes:
        return self.data

    async def answer(self, status: int, data: bytes) -> None:
        self.answers.append((status, msgspec.json.decode(data)))


class Site:
    """A router, with nodes that say what the test gave them to say."""

    def __init__(self, **says: Says) -> None:
        self.rig, self.says = RouterRig(), says
        self.sent: list[tuple[str, Order]] = []
        self.admin = AdapterAdmin(self, self.rig.registry, ("base",), 30.0, lambda: None, wait_s=0.2)  # type: ignore[arg-type]
        for node_id in says:
            self.join(node_id)

    def join(self, node_id: str, protocol: int = PROTOCOL_VERSION, epoch: int = 1, **adapters: str) -> RegisteredNode:
        fingerprint = msgspec.structs.replace(FINGERPRINT, protocol=protocol)
        said = hello("prefill" if node_id.startswith("p") else "decode", node_id, epoch, fingerprint)
        own = [Adapter(name, digest) for name, digest in adapters.items()]
        node, _ = self.rig.registry.hello(
            peer_name(node_id, epoch), msgspec.structs.replace(said, adapters=own), self.rig.now
        )
        assert node is not None
        node.reported(load(free=8))
        return node

    def send_order(self, node: RegisteredNode, order: Order) -> None:
        self.sent.append((node.node_id, order))
        num_sent = sum(name == node.node_id for name, _ in self.sent)
        told = self.says[node.node_id](order, num_sent)
        if told is not None:
            node.reported(load(free=8), adapter_orders=[told])

    def ask(self, method: str, body: object = None, **params: str) -> Answer:
        asked = Asked(method, body, **params)
        handler = self.admin.remove_adapter if method == "DELETE" else self.admin.show_or_load
        asyncio.run(handler(asked))  # type: ignore[arg-type]
        (answer,) = asked.answers
        return answer

    def load(self, name: str = "sql", **more: object) -> Answer:
        return self.ask("POST", {"name": name} | more)


def says(state: str, **more: Any) -> Says:
    return lambda order, count: AdapterOrder(order.number, order.name, state, **more)  # type: ignore[arg-type]


def states(answer: Answer) -> dict[str, str]:
    return {row["node"]: row["state"] for row in answer[1]["nodes"]}


LOADED, REFUSED = says("loaded", digest="x"), says("refused", why="no such folder")


def test_every_node_gets_the_order_and_has_its_row() -> None:
    site = Site(p0=LOADED, d0=REFUSED)
    status, answer = site.load(path="team/sql")
    orders = [order for _, order in site.sent]
    assert [node_id for node_id, _ in site.sent] == ["p0", "d0"]
    assert {(type(order), order.name, order.path) for order in orders} == {(LoadAdapter, "sql", "team/sql")}  # type: ignore[union-attr]
    assert status == 200 and not answer["differs"] and answer["number"] == orders[0].number
    row = {"role": "prefill", "state": "loaded", "digest": "x", "why": "", "requests": 0}
    assert answer["nodes"][0] == {"node": "p0"} | row
    assert answer["nodes"][1]["why"] == "no such folder"


def test_if_no_node_loads_it_the_error_names_each() -> None:
    site = Site(p0=REFUSED, d0=says("refused", why="no --lora-dir"))
    with pytest.raises(Conflict, match="p0 refuses: no such folder; d0 refuses: no --lora-dir"):
        site.load()


def test_nodes_with_other_weights_are_told_apart() -> None:
    site = Site(p0=LOADED, d0=says("loaded", digest="y"))
    assert site.load()[1]["differs"]


def test_a_slow_node_is_not_waited_for_long() -> None:
    status, answer = site_answer = Site(p0=LOADED, d0=says("loading")).load()
    assert status == 202 and states(site_answer) == {"p0": "loaded", "d0": "loading"}
    assert answer["name"] == "sql"


def test_a_lost_order_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.api.admin.admin_adapters.AGAIN_S", 0.0)
    site = Site(p0=lambda order, count: None if count < 3 else LOADED(order, count))
    assert states(site.load()) == {"p0": "loaded"}
    assert len({order.number for _, order in site.sent}) == 1


def test_a_node_of_the_previous_version_is_named() -> None:
    site = Site(p0=LOADED)
    site.join("d0", protocol=PROTOCOL_VERSION - 1)
    assert SINCE["LoadAdapter"] == PROTOCOL_VERSION, "else this test needs another version"
    _, answer = site.load()
    assert answer["nodes"][1]["state"] == "refused" and "upgrade it first" in answer["nodes"][1]["why"]
    assert [node_id for node_id, _ in site.sent] == ["p0"]


def test_a_node_that_left_meanwhile_says_nothing_more() -> None:
    site = Site(p0=LOADED)

    def restarts(order: Order, count: int) -> None:
        site.join("d0", epoch=2)

    site.says["d0"] = restarts
    site.join("d0")
    _, answer = site.load()
    assert answer["nodes"][1]["why"] == "it does not answer, or has left"


def test_a_silent_node_has_its_row() -> None:
    """When it speaks again it has the adapters of before."""
    site = Site(p0=LOADED, d0=LOADED)
    node = site.rig.registry.named("d0")
    assert node is not None
    node.is_silent = True
    status, answer = site.load()
    assert states((status, answer)) == {"p0": "loaded", "d0": "refused"}
    assert "does not answer" in answer["nodes"][1]["why"] and [name for name, _ in site.sent] == ["p0"]


def test_a_removal_says_who_still_uses_it() -> None:
    site = Site(p0=says("removed"), d0=says("leaving", requests=2))
    site.join("p0", sql="x")
    status, answer = site.ask("DELETE", name="sql")
    assert status == 202 and [row["requests"] for row in answer["nodes"]] == [0, 2]
    assert {(type(order), order.move_after_ms) for _, order in site.sent} == {(RemoveAdapter, 30_000)}  # type: ignore[union-attr]
    site.says["d0"] = says("removed")
    assert site.ask("DELETE", {"move_after_s": 1.5}, name="sql")[0] == 200
    assert site.sent[-1][1].move_after_ms == 1500  # type: ignore[union-attr]


def test_a_removal_is_sent_again_while_streams_use_the_adapter() -> None:
    """No node names it any more, but a shorter time may be set. Afterwards it is unknown."""
    site = Site(p0=says("removed"), d0=says("leaving", digest="x", requests=2))
    site.join("d0", sql="x")
    site.ask("DELETE", {"move_after_s": 60}, name="sql")
    site.join("d0").reported(load(free=8), adapter_orders=[AdapterOrder(1, "sql", "leaving", "x", requests=2)])
    site.ask("DELETE", {"move_after_s": 1}, name="sql")
    assert [order.move_after_ms for name, order in site.sent if name == "d0"] == [60_000, 1_000]  # type: ignore[union-attr]
    with pytest.raises(NotFound):
        site.ask("DELETE", name="other")
    site.says["d0"] = says("removed")
    site.ask("DELETE", {"move_after_s": 1}, name="sql")
    with pytest.raises(NotFound):
        site.ask("DELETE", name="sql")


def test_what_nodes_have_is_shown() -> None:
    site = Site(p0=LOADED)
    site.load()
    site.join("d0", sql="x", chat="z")
    status, answer = site.ask("GET")
    assert status == 200 and answer["adapters"] == {"sql": "x", "chat": "z"}
    assert [node["adapters"] for node in answer["nodes"]] == [{}, {"sql": "x", "chat": "z"}]
    (order,) = answer["nodes"][0]["orders"]
    assert (order["name"], order["state"]) == ("sql", "loaded")


@pytest.mark.parametrize(
    ("body", "error", "why"),
    [
        ({"name": "base"}, InvalidRequest, "the model's own name"),
        ({"name": ""}, InvalidRequest, "name"),
        ({"name": "sql\n"}, InvalidRequest, "no line breaks"),
        ({"name": " sql"}, InvalidRequest, "no spaces"),
        ({"name": "sql", "path": ""}, InvalidRequest, "path"),
        ({"name": "sql", "url": "http://a"}, InvalidRequest, "url"),
        ({}, InvalidRequest, "name"),
    ],
)
def test_what_is_not_an_order(body: Mapping[str, str], error: type[BatonError], why: str) -> None:
    site = Site(p0=LOADED)
    with pytest.raises(error, match=why):
        site.ask("POST", body)
    assert not site.sent


def test_without_nodes_or_such_an_adapter_or_admin() -> None:
    with pytest.raises(NoNodes):
        Site().load()
    with pytest.raises(NotFound, match="no node has an adapter 'sql'"):
        Site(p0=LOADED).ask("DELETE", name="sql")

    def off() -> None:
        raise AdminIsOff("admin is off")

    site = Site(p0=LOADED)
    site.admin = AdapterAdmin(site, site.rig.registry, (), 30.0, off)  # type: ignore[arg-type]
    for method in ("GET", "POST", "DELETE"):
        with pytest.raises(AdminIsOff):
            site.ask(method, {"name": "sql"}, name="sql")


# ---- names, and the nodes that have them


def join(rig: RouterRig, role: str, node_id: str, **adapters: str) -> RegisteredNode:
    said = hello(role, node_id)
    own = [Adapter(name, digest) for name, digest in adapters.items()]
    said = type(said)(**{name: getattr(said, name) for name in said.__struct_fields__} | {"adapters": own})
    node, _ = rig.registry.hello(peer_name(node_id, 1), said, rig.now)
    assert node is not None
    node.reported(load(free=8))
    return node


def start(rig: RouterRig, adapter: str) -> tuple[list, list]:
    new = NewRequest([1, 2, 3], 1, SamplingParams(max_tokens=5), seed=7, adapter=adapter)
    _, effects = rig.dispatcher.open([new], rig.now)
    return generates(effects), failures(effects)


def test_only_nodes_with_the_adapter_get_its_requests() -> None:
    rig = RouterRig()
    join(rig, "prefill", "p0")
    join(rig, "prefill", "p1", tuned="x")
    join(rig, "decode", "d0", tuned="y")
    join(rig, "decode", "d1", tuned="x", other="z")
    for _ in range(4):
        (generate,), _ = start(rig, "x")
        assert (generate.decode_node, generate.adapter) == ("d1", "x")
    (alone,), _ = start(rig, "z")
    assert (alone.decode_node, alone.adapter) == ("", "z")
    seen = {start(rig, "")[0][0].decode_node for _ in range(8)}
    assert seen == {"d0", "d1"}


def test_without_such_a_node_there_is_a_typed_error() -> None:
    rig = RouterRig()
    join(rig, "decode", "d0", tuned="x")
    sent, failed = start(rig, "gone")
    assert not sent
    rig.now += 10.0
    failed += failures(rig.dispatcher.tick(rig.now))
    assert failed == [AdapterMissing.code]


def test_names() -> None:
    adapters: dict[str, str] = {}
    resolver = Resolver("hashlm", hash_text_model(), LimitsConfig(), lambda: adapters)

    def planned(model: str) -> GenerationPlan:
        return Completions().plan(CompletionRequest(model=model, prompt="a"), resolver, Contexts(100, 100))

    with pytest.raises(ModelNotFound):
        planned("tuned")
    adapters["tuned"] = "x"
    plan = planned("tuned")
    assert (plan.model, plan.adapter) == ("tuned", "x")
    assert planned("hashlm").adapter == ""


def test_where_nodes_differ_most_of_them_decide() -> None:
    rig = RouterRig()
    for seconds, (node_id, adapters) in enumerate(
        {"d0": {"tuned": "x", "old": "o"}, "d1": {"tuned": "y", "new": "n"}, "d2": {"tuned": "y"}}.items()
    ):
        rig.now = float(seconds)
        join(rig, "decode", node_id, **adapters)
        wanted = "y" if node_id == "d2" else "x"
        assert rig.registry.adapters()["tuned"] == wanted
    assert rig.registry.adapters() == {"tuned": "y", "old": "o", "new": "n"}
    node = rig.registry.named("d2")
    assert node is not None
    node.is_silent = True
    assert rig.registry.adapters()["tuned"] == "x"


@pytest.mark.parametrize("given", ["tuned", "=path", "tuned=", "hashlm=path"])
def test_flags_that_can_not_work(given: str) -> None:
    with pytest.raises(ConfigError, match="--lora"):
        ModelConfig(model="hashlm", lora=(given,))
    with pytest.raises(ConfigError, match="two adapters"):
        ModelConfig(lora=("a=x", "a=y"))
    assert ModelConfig(lora=("a=x=1", "b=y")).adapters == {"a": "x=1", "b": "y"}
