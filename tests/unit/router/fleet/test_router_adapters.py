"""Adapters in the router: names become digests, and requests go to nodes that have them."""

from __future__ import annotations

import pytest

from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.ask.resolve import Resolver
from router.api.openai.completions import CompletionRequest, Completions
from router.fleet.registry import RegisteredNode
from router.requests.new_request import NewRequest
from router.text.hashlm import hash_text_model
from shared.config.settings.settings import LimitsConfig, ModelConfig
from shared.core.errors import AdapterMissing, ConfigError, ModelNotFound
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Adapter
from shared.wire.peers import peer_name
from tests.support.worlds.router_rig import RouterRig, failures, generates, hello, load


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


def test_a_node_that_lacks_it_after_all_is_not_to_blame() -> None:
    rig = RouterRig(max_attempts=2)
    first = join(rig, "decode", "d0", tuned="x")
    (generate,), _ = start(rig, "x")
    join(rig, "decode", "d1", tuned="x")
    effects = rig.end(first, generate.key, 0, "error", "adapter_missing")
    assert [again.adapter for again in generates(effects)] == ["x"]
    assert first.breaker.allows(rig.now)


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
