"""The files for other launchers: what they call exists, and what they refer to in each other, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

import baton_serve
from deploy.cluster.restart_policy import EXIT_CONFIG
from shared.config.load import load
from shared.config.model_path import DEFAULT_REQUIREMENT
from shared.config.processes import NodeProcessConfig, RouterProcessConfig
from shared.core.exit_codes import EXIT_DRAINED
from shared.observe.metric_names import QUEUE_STAGES
from shared.observe.metrics import ClusterMetrics, NodeReport, RequestMetrics, render
from tests.support.installed import FOLDERS
from tests.support.launch_lines import (
    CONFIG,
    LAUNCH,
    dicts_in,
    documents,
    lines_of,
    read_unit,
    shell_lines,
    take_through_the_cli,
)

ROOT = LAUNCH.parents[1]
KUBERNETES, DOCKER = LAUNCH / "kubernetes", LAUNCH / "docker"
COMPOSE = DOCKER / "compose.yaml"
UNITS = sorted((LAUNCH / "systemd").iterdir())

# file -> its `baton` lines: a line that is not found is not checked
LINES = {
    "README.md": 4,
    "docker/compose.yaml": 5,
    "kubernetes/decode.yaml": 3,
    "kubernetes/prefill.yaml": 3,
    "kubernetes/router.yaml": 1,
    "slurm/baton.sbatch": 3,
    "systemd/baton-decode@.service": 1,
    "systemd/baton-prefill@.service": 1,
    "systemd/baton-router.service": 1,
}
WITHOUT = {"baton.toml", "docker/Dockerfile", "docker/Dockerfile.dockerignore", "kubernetes/adapter-rules.yaml",
           "kubernetes/kustomization.yaml", "kubernetes/network.yaml", "kubernetes/nginx.conf",
           "kubernetes/prometheus-values.yaml", "kubernetes/scaling.yaml"}  # fmt: skip


def all_files() -> set[str]:
    return {path.relative_to(LAUNCH).as_posix() for path in LAUNCH.rglob("*") if path.is_file()}


def test_every_file_is_known_here() -> None:
    assert all_files() == set(LINES) | WITHOUT


@pytest.mark.parametrize("name", sorted(LINES))
def test_every_baton_line_is_one_that_the_cli_takes(name: str) -> None:
    lines = lines_of(LAUNCH / name)
    assert len(lines) == LINES[name], lines
    for line in lines:
        take_through_the_cli(line)


@pytest.mark.parametrize(
    "script",
    [
        "baton router --no-such-flag 1",
        "/opt/baton/bin/baton decode --router tcp://127.0.0.1:7001 --page-size x",
        'exec "$BATON" prefill --keys "$KEYS"',  # dials nobody
        "baton admin --url http://127.0.0.1:8000 drain",
        "install x && baton decode --router tcp://10.0.0.1:7001 | cat",  # another machine without keys
    ],
)
def test_a_line_that_the_cli_refuses_is_found(script: str) -> None:
    (line,) = shell_lines(script)
    with pytest.raises((AssertionError, Exception), match="refuses|dials nobody|baton keys"):
        take_through_the_cli(line)


@pytest.mark.parametrize("name", sorted(all_files() - {"README.md", "docker/Dockerfile.dockerignore"}))
def test_every_file_says_what_was_run_of_it(name: str) -> None:
    head = (LAUNCH / name).read_text("utf-8")[:1600]
    assert "What was run: " in head and ("Not run: " in head or "kustomization.yaml" in head or name == "baton.toml")


def test_the_configuration_serves_all_processes() -> None:
    router = load(RouterProcessConfig, {}, CONFIG)
    node = load(NodeProcessConfig, {}, CONFIG, {"node": {"role": "decode"}})
    assert (router.router.node_endpoint,) == node.parts.node.router
    assert router.security == node.parts.security and router.security.has_keys


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units(path: Path) -> None:
    unit = read_unit(path)
    service = unit["Service"]
    assert set(unit.sections()) == {"Unit", "Service", "Install"} and unit["Install"]["WantedBy"]
    is_router = "router" in path.name
    drain_s = load(NodeProcessConfig, {}, CONFIG, {"node": {"role": "decode"}}).parts.node.drain_s
    shutdown_s = load(RouterProcessConfig, {}, CONFIG).timeouts.shutdown_s
    assert int(service["TimeoutStopSec"]) > (shutdown_s if is_router else drain_s)
    stays_down = {EXIT_CONFIG} if is_router else {EXIT_CONFIG, EXIT_DRAINED}
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == stays_down
    assert is_router or int(service["SuccessExitStatus"]) == EXIT_DRAINED
    assert service["User"] != "root" and service["NoNewPrivileges"] == "yes"
    assert "PrivateUsers" not in service and "MemoryDenyWriteExecute" not in service


def test_the_image_has_what_it_needs_in_the_pinned_versions() -> None:
    text = (DOCKER / "Dockerfile").read_text("utf-8")
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert re.findall(r'"(torch==[^"+]+)\+cpu"', text) == [f"torch=={pins['torch']}"]
    assert f'--no-deps "{DEFAULT_REQUIREMENT}"' in text
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == set(FOLDERS) | {"constraints.txt", "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in names)
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == names and "*" in ignored
    assert 'ENTRYPOINT ["baton"]' in text and re.search(r"^USER baton$", text, re.MULTILINE)


def test_everybody_means_the_same_image() -> None:
    text = "".join(path.read_text("utf-8") for path in LAUNCH.rglob("*") if path.is_file())
    versions = {version for version in re.findall(r"\bbaton:([\d.]+\d)", text)}
    assert versions == {baton_serve.__version__}
    (uid,) = re.findall(r"--uid (\d+)", text)
    assert {one["runAsUser"] for path in KUBERNETES.glob("*.yaml") for one in dicts_in(documents(path))
            if "runAsUser" in one} == {int(uid)}  # fmt: skip


def compose() -> dict[str, Any]:
    (found,) = documents(COMPOSE)
    return found


def test_compose_refers_to_what_is_there() -> None:
    whole = compose()
    services, volumes = whole["services"], set(whole["volumes"])
    known = {
        "image", "build", "profiles", "network_mode", "volumes", "command", "secrets", "networks", "ports", "restart",
        "stop_grace_period", "init", "healthcheck", "depends_on", "cpuset",
    }  # fmt: skip
    for name, service in services.items():
        assert set(service) <= known, name
        assert set(service.get("depends_on", [])) <= set(services)
        assert set(service.get("secrets", [])) <= set(whole["secrets"])
        assert set(service.get("networks", {})) <= set(whole["networks"])
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in volumes or source == "./tls" or (DOCKER / source).exists(), mount
    assert services["tls"]["network_mode"] == "service:router"
    assert (DOCKER / services["router"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / services["router"]["build"]["dockerfile"]).exists()


def test_folders_that_the_image_makes_are_mounted_over() -> None:
    """A fresh volume takes owner and mode from there."""
    (made,) = re.findall(r"install -d (?:-\w \w+ )+(.+)$", (DOCKER / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    mounted = [mount.split(":") for service in compose()["services"].values() for mount in service.get("volumes", [])]
    assert set(made.split()) == {target for source, target, *_ in mounted if source in compose()["volumes"]}


def test_compose_nodes_have_the_address_and_key_that_they_name() -> None:
    services = compose()["services"]
    made = take_through_the_cli(services["keys"]["command"])
    assert made.router == ["router"] and set(made.node) == {name for name in services if name[-1].isdigit()}
    router = take_through_the_cli(services["router"]["command"]).router
    address = services["router"]["networks"]["nodes"]["ipv4_address"]
    assert router.node_endpoint == f"tcp://{address}:7001" and router.router_id == "router"
    cores = []
    for name in made.node:
        config = take_through_the_cli(services[name]["command"])
        assert (config.parts.node.node_id, config.parts.node.role) == (name, name[:-2])
        assert config.parts.node.bind_host == services[name]["networks"]["nodes"]["ipv4_address"]
        assert config.parts.node.router == (router.node_endpoint,)
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > config.parts.node.drain_s
        first, _, last = services[name]["cpuset"].partition("-")
        cores += range(int(first), int(last or first) + 1)
    assert len(set(cores)) == len(cores)


def objects() -> list[dict[str, Any]]:
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    assert all((KUBERNETES / name).exists() for one in kustomization["configMapGenerator"] for name in one["files"])
    return [document for name in kustomization["resources"] for document in documents(KUBERNETES / name)]


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [found for found in objects() if found["kind"] in kinds]


def pods() -> list[dict[str, Any]]:
    return [found["spec"]["template"] for found in of_kind("Deployment", "StatefulSet")]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def ports(pod: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for one in containers(pod) for port in one.get("ports", [])}


def test_services_lead_to_ports_that_pods_have() -> None:
    for service in of_kind("Service"):
        chosen = [pod for pod in pods() if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()]
        assert len(chosen) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            assert target in {*ports(chosen[0]), *ports(chosen[0]).values()}
    inside = next(one for one in of_kind("Service") if one["metadata"]["name"] == "baton-inside")
    assert inside["spec"]["publishNotReadyAddresses"] is True  # else nodes and router wait for each other


def test_selectors_and_services_of_sets() -> None:
    services = {one["metadata"]["name"] for one in of_kind("Service")}
    for one in of_kind("Deployment", "StatefulSet"):
        assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"].get("serviceName", "baton") in services
    chosen = [one["spec"]["selector"]["matchLabels"] for one in of_kind("PodDisruptionBudget")]
    assert all(any(labels == pod["metadata"]["labels"] for pod in pods()) for labels in chosen)


def test_pods_mount_what_they_have_and_probe_ports_that_are_open() -> None:
    for pod in pods():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        mounted = {mount["name"] for one in containers(pod) for mount in one["volumeMounts"]}
        assert mounted == volumes
        for one in containers(pod):
            probes = [one[kind] for kind in ("startupProbe", "livenessProbe", "readinessProbe") if kind in one]
            named = [probe[how]["port"] for probe in probes for how in ("tcpSocket", "httpGet") if how in probe]
            assert set(named) <= set(ports(pod))
            assert one in pod["spec"].get("initContainers", []) or probes


def readme() -> str:
    return (LAUNCH / "README.md").read_text("utf-8")


def test_the_readme_s_commands_make_all_secrets_and_config_maps() -> None:
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    made = {one["name"] for one in kustomization["configMapGenerator"]}
    made |= set(re.findall(r"create (?:secret \w+|configmap) ([\w-]+)", readme()))
    volumes = [volume for pod in pods() for volume in pod["spec"]["volumes"]]
    wanted = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    wanted |= {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}
    assert wanted == made
    for name in ("api.key", "admin.key", "ca.crt"):
        assert name in readme()


def keys_made() -> list[Any]:
    return [take_through_the_cli(line) for line in lines_of(LAUNCH / "README.md") if line[:2] == ["keys", "create"]]


def test_as_many_nodes_have_keys_as_may_be_started() -> None:
    systemd, kubernetes = keys_made()
    most = {one["spec"]["scaleTargetRef"]["name"]: one["spec"]["maxReplicas"] for one in of_kind(SCALER)}
    assert set(kubernetes.node) == {f"{role}-{i}" for role, number in most.items() for i in range(number)}
    units = re.search(r"enable --now baton-router (.*)", readme())
    assert units and set(systemd.node) == set(units[1].replace("baton-", "").replace("@", "-").split())
    assert systemd.router == kubernetes.router == ["router"]


SCALER = "HorizontalPodAutoscaler"


def test_sets_are_named_as_their_nodes_keys_are() -> None:
    for one in of_kind("StatefulSet"):
        name, (node,) = one["metadata"]["name"], one["spec"]["template"]["spec"]["containers"]
        assert node["args"][0] == name and "--node-id=$(POD_NAME)" in node["args"]
        assert {entry["name"] for entry in node["env"]} == {"POD_NAME", "POD_IP"}


def test_a_pod_has_time_to_drain_before_it_is_killed() -> None:
    for one in of_kind("StatefulSet"):
        spec = one["spec"]["template"]["spec"]
        (node,) = spec["containers"]
        (drain,) = shell_lines(node["lifecycle"]["preStop"]["exec"]["command"][2])
        args = take_through_the_cli(drain)
        drain_s = take_through_the_cli(
            [word.replace("$(POD_IP)", "10.0.0.1") for word in node["args"]]
        ).parts.node.drain_s
        assert args.action == "drain" and args.move_after < args.timeout
        assert args.timeout + drain_s < spec["terminationGracePeriodSeconds"]
        assert args.url == "https://baton-inside:8444" and not args.force


def test_the_start_up_probe_reads_what_baton_admin_prints() -> None:
    from deploy.cluster.admin import table

    row = {"node": "decode-1", "role": "decode", "state": "ready", "open_sequences": 0, "pages": {}, "waiting": 0}
    printed = table({"open_requests": 0, "nodes": [row | {"epoch": "1"}, row | {"epoch": "1", "node": "decode-10"}]})
    (node,) = next(one for one in of_kind("StatefulSet"))["spec"]["template"]["spec"]["containers"]
    found = re.search(r'grep -Eq "(.*)"$', node["startupProbe"]["exec"]["command"][2])
    assert found is not None
    pattern = found[1].replace("$POD_NAME", "decode-1")
    assert len(re.findall(pattern, printed, re.MULTILINE)) == 1
    assert not re.search(pattern, printed.replace("ready", "silent"), re.MULTILINE)


def test_baton_admin_prints_pairs_that_can_t_connect() -> None:
    from deploy.cluster.admin import table

    cut = {"prefill": "prefill-1", "decode": "decode-1", "endpoint": "tcp://10.0.0.2:7002", "since_s": 12.4, "tries": 3}
    printed = table({"open_requests": 0, "nodes": [], "unreachable": [cut]})
    assert "prefill-1 -> decode-1  can't connect to tcp://10.0.0.2:7002, for 12 s" in printed.splitlines()


def test_baton_admin_prints_nodes_that_are_kept_apart() -> None:
    from deploy.cluster.admin import table

    stranger = {"node": "decode-2", "role": "decode", "protocol": 12, "ours": 13}
    apart = {"a": "decode-1", "b": "prefill-0", "differs": "numerics"}
    printed = table({"open_requests": 0, "nodes": [], "strangers": [stranger], "misfits": [apart]}).splitlines()
    assert "decode-2 speaks protocol 12, this router 13: it gets no requests" in printed
    assert "decode-1 and prefill-0 do not pair: numerics differs" in printed


def shown_by_the_router() -> dict[str, set[str]]:
    """Metric -> its label names, as a router with one node renders them."""
    registry = CollectorRegistry()
    RequestMetrics(registry)
    samples = {f"queue_seconds.{stage}": [0.1] for stage in QUEUE_STAGES}
    ClusterMetrics(registry).update(NodeReport("d", "decode", 1, 1, {"free": 1}, {"free": 1}, 0, 1, {}, samples))
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? ", render(registry).decode(), re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_scaling_asks_for_metrics_that_there_are() -> None:
    (rules,) = documents(KUBERNETES / "adapter-rules.yaml")
    shown, external = shown_by_the_router(), rules["rules"]["external"]
    for rule in external:
        labels = set(re.findall(r"(\w+)=", rule["metricsQuery"])) | set(
            re.findall(r"by \((\w+)\)", rule["metricsQuery"])
        )
        assert labels <= shown[rule["seriesQuery"]], rule
    asked = {one["external"]["metric"]["name"] for scaler in of_kind(SCALER) for one in scaler["spec"]["metrics"]}
    assert asked == {rule["name"]["as"] for rule in external}
    quantiles = [rule["metricsQuery"] for rule in external if "quantile" in rule["metricsQuery"]]
    assert quantiles and all(query.endswith(">= 0) or vector(0)") for query in quantiles)  # never NaN
    stage = re.findall(r'stage="(\w+)"', str(rules))
    assert stage and set(stage) <= set(QUEUE_STAGES)
    sets = {one["metadata"]["name"]: one["spec"]["replicas"] for one in of_kind("StatefulSet")}
    for scaler in of_kind(SCALER):
        spec = scaler["spec"]
        assert spec["minReplicas"] <= sets[spec["scaleTargetRef"]["name"]] <= spec["maxReplicas"]


def test_prometheus_asks_the_operators_port_with_the_clients_key() -> None:
    (values,) = documents(KUBERNETES / "prometheus-values.yaml")
    (job,) = yaml.safe_load(values["extraScrapeConfigs"])
    (asked,) = job["dns_sd_configs"]
    services = {one["metadata"]["name"]: one["spec"]["ports"] for one in of_kind("Service")}
    (name,) = asked["names"]
    assert {"name": "admin", "port": asked["port"]}.items() <= services[name.split(".")[0]][1].items()
    assert job["tls_config"]["server_name"] == name.split(".")[0] and job["scheme"] == "https"
    mounts = [*values["server"]["extraSecretMounts"], *values["server"]["extraConfigmapMounts"]]
    mounted = {mount["mountPath"]: mount.get("secretName") or mount["configMap"] for mount in mounts}
    files = {job["authorization"]["credentials_file"]: "api.key", job["tls_config"]["ca_file"]: "ca.crt"}
    for file, made in files.items():
        assert file.endswith(f"/{made}") and f"{mounted[file.rpartition('/')[0]]} --from-file={made}" in readme()


def test_the_proxy_shows_clients_neither_admin_nor_metrics() -> None:
    text = (KUBERNETES / "nginx.conf").read_text("utf-8")
    assert text.count("{") == text.count("}")
    clients, operators = text.split("server {")[1:]
    paths = re.compile(r"location (?:= )?(\S+) \{\s*(return 404|proxy_pass)")
    assert dict(paths.findall(clients)) == {"/admin/": "return 404", "/metrics": "return 404", "/": "proxy_pass"}
    assert set(dict(paths.findall(operators)).values()) == {"proxy_pass"}
    assert "listen 8443 ssl" in clients and "listen 8444 ssl" in operators
    default = RouterProcessConfig()
    assert set(re.findall(r"proxy_pass (\S+);", text)) == {f"http://{default.router.host}:{default.router.port}"}
    read_s = int(re.findall(r"proxy_read_timeout (\d+)s", text)[0])
    assert read_s > default.timeouts.request_timeout_s and "proxy_buffering off" in text
    body = re.findall(r"client_max_body_size (\d+)m", text)
    assert int(body[0]) << 20 == default.limits.max_body_bytes


def test_network_policies_admit_what_is_dialled() -> None:
    (policy,) = of_kind("NetworkPolicy")
    admitted = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert admitted == {number for pod in pods() for number in ports(pod).values()}
    open_to_all = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert open_to_all == [[{"port": 8443}]]


def test_no_probe_knocks_at_ports_that_want_keys() -> None:
    """Each knock would be counted as a refused connection."""
    keyed = {"nodes", "pages"}
    probes = [one[kind] for pod in pods() for one in containers(pod) for kind in one if kind.endswith("Probe")]
    assert probes and not [probe for probe in probes if probe.get("tcpSocket", {}).get("port") in keyed]
