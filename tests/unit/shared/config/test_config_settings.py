"""Settings: limits, loopback only, cross-field rules, and that every field can be a flag."""

from __future__ import annotations

import dataclasses
import re

import pytest

from shared.config.core_plan import CorePlan
from shared.config.flags import concerns_of, fields_of, sections_of
from shared.config.load import all_concerns
from shared.config.processes import (
    ClusterConfig,
    NodeParts,
    NodeProcessConfig,
    RayClusterConfig,
    RouterProcessConfig,
    router_process,
)
from shared.config.settings.endpoints import check_endpoint, is_ipv6, tcp_endpoint
from shared.config.settings.http_settings import HttpConfig
from shared.config.settings.local_settings import LocalConfig
from shared.config.settings.options import option_of, parse_bytes
from shared.config.settings.router_settings import RouterConfig
from shared.config.settings.settings import (
    MemoryConfig,
    ModelConfig,
    NodeConfig,
    ParallelConfig,
    SchedConfig,
    SecurityConfig,
    SpecConfig,
)
from shared.config.settings.transfer_settings import TransferConfig
from shared.core.errors import ConfigError
from shared.model.formats.opened import MOST_STAGES, MOST_WIDTH
from shared.wire.zeromq.link import open_router
from shared.wire.zeromq.link_options import LinkOptions
from tests.support.cores.changed_config import replaced


def far(node: NodeConfig, **transfer: bool) -> NodeParts:
    """A node of several machines, with keys."""
    return NodeParts(node=node, security=SecurityConfig(keys="keys"), transfer=TransferConfig(**transfer))


PROCESSES = (ClusterConfig, NodeProcessConfig, RouterProcessConfig)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ModelConfig(dtype="int7"), "--dtype"),
        (lambda: ModelConfig(model=""), "--model"),
        (lambda: ModelConfig(max_context=-1), "--max-context"),
        (lambda: MemoryConfig(page_size=24), "--page-size"),
        (lambda: MemoryConfig(page_size=0), "--page-size"),
        (lambda: MemoryConfig(mem_fraction=1.5), "--mem-fraction"),
        (lambda: MemoryConfig(mem_fraction=float("nan")), "--mem-fraction"),
        (lambda: SchedConfig(chunk_size=-1), "--chunk-size"),
        (lambda: SpecConfig(spec="medusa"), "--spec"),
        (lambda: SpecConfig(spec_width=1), "--spec-width"),
        (lambda: SpecConfig("ngram", spec_width=MOST_WIDTH + 1), "--spec-width"),
        (lambda: ParallelConfig(tp=0), "--tp"),
        (lambda: ParallelConfig(tp=2, dp=2), "--tp 2 --dp 2"),
        (lambda: NodeParts(parallel=ParallelConfig(dp=2), spec=SpecConfig(spec="eagle")), "--dp 2 --spec eagle"),
        (lambda: NodeParts(parallel=ParallelConfig(dp=2), spec=SpecConfig(spec="mtp")), "--dp 2 --spec mtp"),
        (lambda: NodeParts(parallel=ParallelConfig(dp=2), sched=SchedConfig(device="cuda")), "--dp 2"),
        (lambda: ParallelConfig(pp=0), "--pp"),
        (lambda: ParallelConfig(pp=MOST_STAGES + 1), "--pp"),
        (lambda: ParallelConfig(tp=2, pp=2), "--tp 2 --pp 2"),
        (lambda: ParallelConfig(dp=2, pp=3), "--dp 2 --pp 3"),
        (lambda: NodeParts(parallel=ParallelConfig(pp=2), sched=SchedConfig(device="cuda")), "--pp 2"),
        (
            lambda: NodeParts(parallel=ParallelConfig(pp=2), transfer=TransferConfig(layer_parts=6)),
            "--pp 2 --layer-parts 6",
        ),
        (lambda: NodeConfig(transport="pigeon"), "--transport"),
        (lambda: far(NodeConfig(transport="gloo", bind_host="10.0.0.2")), "--trust-network"),
        (lambda: far(NodeConfig(transport="nixl", bind_host="10.0.0.2")), "--transport nixl"),
        (lambda: NodeParts(node=NodeConfig(router=("http://127.0.0.1:1",))), "--router"),
        (lambda: RouterConfig(port=70000), "--port"),
        (lambda: RouterConfig(policy="random"), "--policy"),
        (lambda: RouterConfig(router_id="x" * 65), "--router-id"),
        (lambda: CorePlan(cpus=(-1,)), "--cpus"),
        (lambda: LocalConfig(prefill=0, decode=0), "--prefill 0 --decode 0"),
    ],
)
def test_a_bad_value_is_refused_and_the_flag_named(make, named):
    with pytest.raises(ConfigError, match=named):
        make()


def test_an_unproven_network_is_taken_where_somebody_says_so() -> None:
    for transport in ("gloo", "nccl", "nixl"):
        far(NodeConfig(transport=transport, bind_host="10.0.0.2"), trust_network=True)
        NodeParts(node=NodeConfig(transport=transport))
    far(NodeConfig(bind_host="10.0.0.2"))


def test_an_ipv6_address_needs_no_brackets_before_a_port():
    """Kubernetes puts a pod's address into `tcp://$(POD_IP):7001` as it is."""
    check_endpoint("tcp://::1:7001", "--node-endpoint", has_keys=False)
    with pytest.raises(ConfigError, match="`baton keys"):
        check_endpoint("tcp://fd00::1:7001", "--node-endpoint", has_keys=False)
    context, _, socket = open_router("tcp://::1:0", LinkOptions())
    assert socket.endpoint.startswith("tcp://[::1]:")
    socket.close()
    context.term()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_addresses_beyond_loopback_are_refused_with_the_reason(host):
    """Each with what opens it: keys between nodes, something that encrypts for clients."""
    for process in (NodeProcessConfig, ClusterConfig):
        with pytest.raises(ConfigError, match="`baton keys"):
            replaced(process(), node={"bind_host": host})
    tls, keys = {"tls_cert": "c", "tls_key": "k"}, {"api_key_file": "f"}
    for security in (SecurityConfig(), SecurityConfig(keys="/some/folder")):
        for router, http, why in (
            ({}, {}, "--tls-cert and --tls-key, or --plain-http"),
            (keys, {}, "--tls-cert and --tls-key, or --plain-http"),
            ({}, tls, "give --api-key-file"),
            ({}, {"plain_http": True}, "give --api-key-file"),
            ({**keys, "admin_without_key": True}, tls, "leave out --admin-without-key"),
        ):
            parts = {"router": RouterConfig(host=host, **router), "http": HttpConfig(**http)}
            with pytest.raises(ConfigError, match=f"--host is '{re.escape(host)}': .*{why}"):
                RouterProcessConfig(**parts, security=security)
            with pytest.raises(ConfigError, match=why):
                ClusterConfig(**parts, nodes=NodeParts(security=security))
    for http in (tls, {"plain_http": True}):
        RouterProcessConfig(router=RouterConfig(host=host, **keys), http=HttpConfig(**http))


@pytest.mark.parametrize("given", [{"tls_cert": "c"}, {"tls_key": "k"}])
def test_a_certificate_and_its_key_belong_together(given):
    with pytest.raises(ConfigError, match="give both or none"):
        HttpConfig(**given)
    with pytest.raises(ConfigError, match="--plain-http contradicts"):
        HttpConfig(tls_cert="c", tls_key="k", plain_http=True)
    assert not HttpConfig().has_tls and HttpConfig(tls_cert="c", tls_key="k").scheme == "https"


@pytest.mark.parametrize("process", [NodeProcessConfig, ClusterConfig, RouterProcessConfig])
def test_endpoints_beyond_this_machine_need_keys(process):
    far = {"router": {"node_endpoint": "tcp://10.0.0.1:7001"}}
    if process is not RouterProcessConfig:
        far = {"node": {"bind_host": "10.0.0.1", "router": ("tcp://10.0.0.1:7001",)}}
    with pytest.raises(ConfigError, match="`baton keys"):
        replaced(process(), **far)
    with_keys = replaced(process(), **far, security={"keys": "/some/folder"})
    assert sections_of(with_keys)["security"].has_keys


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "::0", "::ffff:0.0.0.0", "0", "*", ""])
def test_a_node_tells_others_one_address(host):
    with pytest.raises(ConfigError, match="name a single address of this machine"):
        NodeParts(node=NodeConfig(bind_host=host), security=SecurityConfig(keys="/some/folder"))


def test_loopback_addresses_are_taken():
    for host in ("127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"):
        RouterProcessConfig(router=RouterConfig(host=host))
        check_endpoint(tcp_endpoint(host, 7001), "--router", has_keys=False)
    check_endpoint("ipc:///tmp/a.sock", "--router", has_keys=False)
    assert is_ipv6("tcp://[::]:7001") and not is_ipv6("tcp://10.0.0.1:7001") and not is_ipv6("ipc:///tmp/a:b")


@pytest.mark.parametrize(
    "endpoint",
    ["", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://127.0.0.1:99999", "ipc://", "tcp://1.2.3.4:5"],
)
def test_other_endpoints_are_refused(endpoint):
    with pytest.raises(ConfigError, match="--router"):
        check_endpoint(endpoint, "--router", has_keys=False)


def test_mtp_of_hashlm_has_two_layers_or_more():
    spec, hashlm = SpecConfig(spec="mtp"), ModelConfig(model="hashlm")
    assert NodeParts(model=hashlm, spec=spec).spec.width == 4
    narrow = SpecConfig(spec="mtp", spec_width=2)
    assert NodeParts(model=ModelConfig(model="/models/deepseek"), spec=narrow).spec.width == 2
    with pytest.raises(ConfigError, match="--spec-width must be at least 3"):
        NodeParts(model=hashlm, spec=narrow)


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [
        ("smollm2", (), "smollm2"),
        ("/models/Tiny.gguf", (), "Tiny"),
        ("/models/Qwen3-0.6B/", (), "Qwen3-0.6B"),
        ("hashlm", ("my-model",), "my-model"),
        ("hashlm", ("",), "hashlm"),
        ("hashlm", ("my-model", "other"), "my-model"),
    ],
)
def test_public_name(model, served, name):
    config = ModelConfig(model=model, served_model_name=served)
    assert config.public_name == name and config.public_names == (tuple(filter(None, served)) or (name,))


@pytest.mark.parametrize(
    "more", [{"served_model_name": ("a", "a")}, {"served_model_name": ("a", "", "a")},
             {"served_model_name": ("a", "b"), "lora": ("b=/x",)}],
)  # fmt: skip
def test_a_model_s_names_are_its_own(more):
    with pytest.raises(ConfigError, match="--served-model-name|--lora b"):
        ModelConfig(model="hashlm", **more)


def test_sizes():
    assert [parse_bytes(text) for text in ("7", "1KiB", "1.5 MiB", "2gb")] == [7, 1024, 3 << 19, 2 * 10**9]
    for text in ("", "MiB", "-1", "1TB", "1 2", "0x10"):
        with pytest.raises(ConfigError, match="size"):
            parse_bytes(text)


@pytest.mark.parametrize("config", [ClusterConfig(), RayClusterConfig()], ids=["local", "ray"])
def test_a_cluster_s_router_has_the_cluster_s_settings(config: ClusterConfig | RayClusterConfig) -> None:
    """Also those that nodes have too: a router that may ask the hub, while nodes may not, would not start."""
    own, cores = RouterConfig(router_id="r7"), CorePlan(threads=3)
    made = router_process(config, own, cores)
    assert made.router is own and made.cores is cores
    for field in dataclasses.fields(RouterProcessConfig):
        if field.name not in ("router", "cores"):
            given = config if hasattr(config, field.name) else config.nodes
            assert getattr(made, field.name) is getattr(given, field.name), field.name


@pytest.mark.parametrize("process", PROCESSES)
def test_field_names_are_unique_in_a_process_so_flags_are_too(process):
    names = [field.name for settings in concerns_of(process).values() for field, _ in fields_of(settings)]
    assert sorted(names) == sorted(set(names))


def test_every_field_has_help_and_a_concern_has_a_dozen_at_most():
    for settings in all_concerns().values():
        declared = [option_of(field) for field, _ in fields_of(settings)]
        assert all(len(option.help) > 5 for option in declared), settings
        assert len(declared) <= 12, settings
