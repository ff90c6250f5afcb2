"""The Helm chart, as it is rendered with each of its values files: what refers to what, and what pods may do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml

import baton_serve
from shared.config.processes import NodeProcessConfig
from tests.support.house import chart, queries
from tests.support.house.launch_lines import LAUNCH, dicts_in, lines_in, lines_of, take_through_the_cli

everywhere = pytest.mark.parametrize("name", chart.NAMES)
README = (LAUNCH / "README.md").read_text("utf-8")
KEYED = {"nodes", "pages"}  # ports that count each stranger's knock as a refused connection
EXTRAS = ("HTTPRoute", "BackendTLSPolicy", "PodMonitor", "PrometheusRule", "ScaledObject")


@cache
def objects(name: str) -> list[dict[str, Any]]:
    return chart.kept(name)[1]


def of_kind(name: str, *kinds: str) -> list[dict[str, Any]]:
    return [one for one in objects(name) if one["kind"] in kinds]


def title(one: dict[str, Any]) -> str:
    return str(one["metadata"]["name"])


def pods(name: str) -> dict[str, dict[str, Any]]:
    return {title(one): one["spec"]["template"] for one in of_kind(name, "StatefulSet")}


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]


def ports(pod: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for one in containers(pod) for port in one.get("ports", [])}


def probes(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (one[kind] for one in containers(pod) for kind in one if kind.endswith("Probe"))


@everywhere
def test_the_chart_was_rendered_as_it_is(name: str) -> None:
    digest, found = chart.kept(name)
    assert digest == chart.digest(), "render it again: python -m tests.support.house.chart --write"
    assert len(found) >= 12


@pytest.mark.skipif(shutil.which("helm") is None, reason="no helm here")
def test_helm_renders_what_is_kept_and_refuses_bad_scaling() -> None:
    assert chart.main([]) == 0
    scaling = "prefill.scaling.enabled=true,prefill.scaling.minReplicas=5"
    command = ["helm", "template", chart.RELEASE, str(chart.CHART), "--set", scaling]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode and "prefill.scaling: minReplicas is above maxReplicas" in done.stderr


def named(schema: dict[str, Any], whole: dict[str, Any], values: Any, at: str = "") -> Iterator[str]:
    """Paths at which values and schema name different things."""
    schema = whole["definitions"]["node"] if "$ref" in schema else schema
    if isinstance(values, dict) and "properties" in schema:
        yield from (f"{at}.{key}" for key in values.keys() ^ (schema["properties"].keys() - {"global", "claims"}))
        assert schema["additionalProperties"] is False, at
        for key, value in ((key, values[key]) for key in schema["properties"].keys() & values.keys()):
            yield from named(schema["properties"][key], whole, value, f"{at}.{key}")


def test_values_and_their_schema_name_the_same_things() -> None:
    schema = json.loads((chart.CHART / "values.schema.json").read_text("utf-8"))
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text("utf-8"))
    assert list(named(schema, schema, values)) == []
    assert list(named(schema, schema, values | {"router": values["router"] | {"replica": 1}})) == [".router.replica"]


def without(values: Any, path: list[str]) -> Any:
    """Return values without what a file's bare `image:` takes away: Helm drops a key whose value is null."""
    return {
        key: without(value, path[1:]) if key == path[0] else value
        for key, value in values.items()
        if [key] != path
    }  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        "image.repository", "secrets", "router.image.repository", "tls.image.tag", "prefill",
        "decode.scaling.maxReplicas", "monitoring.credentials.key", "caConfigMap",
    ],
)  # fmt: skip
def test_values_that_are_half_written_are_named(path: str) -> None:
    schema = json.loads((chart.CHART / "values.schema.json").read_text("utf-8"))
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text("utf-8"))
    checker = jsonschema.Draft7Validator(schema)
    assert list(checker.iter_errors(values)) == []
    (found,) = checker.iter_errors(without(values, path.split(".")))
    assert found.message == f"{path.rpartition('.')[2]!r} is a required property"


def test_the_chart_has_the_version_and_user_of_the_image() -> None:
    about = yaml.safe_load((chart.CHART / "Chart.yaml").read_text("utf-8"))
    assert about["version"] == about["appVersion"] == baton_serve.__version__
    (uid,) = re.findall(r"--uid (\d+)", (LAUNCH / "docker" / "Dockerfile").read_text("utf-8"))
    found = {pod["spec"]["securityContext"].get("runAsUser") for name in chart.NAMES for pod in pods(name).values()}
    assert found == {int(uid), None}  # None: OpenShift's choice


IMAGES = {
    "plain": {
        "baton-router": ["registry.example.com/baton:0.1.0"],
        "baton-decode": ["registry.example.com/baton:0.1.0"],
    },
    "volume": {
        "baton-router": ["registry.example.com/baton-router:0.1.0"],
        "baton-decode": ["registry.example.com/baton:0.1.0"],
    },
    "everything": {
        "baton-router": [f"registry.example.com/baton-router@sha256:{64 * '2'}"],
        "baton-decode": [f"registry.example.com/baton@sha256:{64 * '0'}"],
    },
}


@pytest.mark.parametrize("name", IMAGES)
def test_routers_may_have_an_image_of_their_own(name: str) -> None:
    """The container that copies keys has the image of the one that reads them."""
    for pod, images in IMAGES[name].items():
        found = [one["image"] for one in containers(pods(name)[pod]) if one["name"] != "tls"]
        assert found == 2 * images
    assert [one["image"] for one in containers(pods(name)["baton-prefill"])] == 2 * IMAGES[name]["baton-decode"]


@everywhere
def test_every_baton_line_is_one_that_the_cli_takes(name: str) -> None:
    lines = [line for line in lines_in(objects(name)) if line]
    assert sorted(line[0] for line in lines) == ["decode", "prefill", "router"]
    for line in lines:
        take_through_the_cli(line)


@everywhere
def test_services_sets_and_budgets_choose_pods(name: str) -> None:
    services = {title(one): one["spec"] for one in of_kind(name, "Service")}
    for service in services.values():
        (chosen,) = [pod for pod in pods(name).values() if service["selector"] == pod["metadata"]["labels"]]
        for port in service["ports"]:
            assert port.get("targetPort", port["port"]) in {*ports(chosen), *ports(chosen).values()}
    assert services["baton-inside"]["publishNotReadyAddresses"] is True  # else nodes and routers wait for each other
    for one in of_kind(name, "StatefulSet"):
        assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["serviceName"] in services
    budgets = {title(one): one["spec"] for one in of_kind(name, "PodDisruptionBudget")}
    assert budgets.keys() == pods(name).keys()
    for own, budget in budgets.items():
        assert budget["selector"]["matchLabels"] == pods(name)[own]["metadata"]["labels"]
        assert budget["maxUnavailable"] == 1


@everywhere
def test_pods_mount_what_they_have_and_probe_open_ports(name: str) -> None:
    for pod in pods(name).values():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for one in containers(pod) for mount in one["volumeMounts"]} == volumes
        asked = [probe[how]["port"] for probe in probes(pod) for how in ("tcpSocket", "httpGet") if how in probe]
        assert set(asked) <= ports(pod).keys() - KEYED and asked
        for one in pod["spec"]["containers"]:
            assert {"livenessProbe", "readinessProbe"} <= one.keys()
        assert all("startupProbe" in one for one in pod["spec"]["initContainers"])


@everywhere
def test_pods_fit_the_restricted_profile(name: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/, and more than that."""
    for pod in pods(name).values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert {kind for volume in spec["volumes"] for kind in volume} - {"name"} <= {
            "secret", "configMap", "emptyDir", "persistentVolumeClaim"
        }  # fmt: skip
        for one in containers(pod):
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert {"cpu", "memory"} <= one["resources"]["requests"].keys() & one["resources"]["limits"].keys()


@everywhere
def test_what_processes_write_to_is_not_the_root(name: str) -> None:
    """The home folder has the caches; /tmp the proxy's bodies and the ranks' sockets; /dev/shm the table of cores."""
    for own, pod in pods(name).items():
        read_only = {
            mount["mountPath"] for one in containers(pod) for mount in one["volumeMounts"] if "readOnly" in mount
        }
        for one in pod["spec"]["containers"]:
            written = {mount["mountPath"] for mount in one["volumeMounts"]} - read_only
            home = {entry["value"] for entry in one.get("env", []) if entry["name"] == "HOME"}
            assert {"/tmp"} | home <= written
            assert home or one["name"] == "tls"
        assert ("/dev/shm" in written) == (own != "baton-router")


def drained(pod: dict[str, Any]) -> NodeProcessConfig:
    (line,) = (line for line in lines_in([pod]) if line[0] in ("prefill", "decode"))
    config = take_through_the_cli(line)
    assert isinstance(config, NodeProcessConfig)
    return config


@everywhere
def test_pods_have_time_to_end_and_names_of_their_keys(name: str) -> None:
    for own, pod in pods(name).items():
        first = pod["spec"]["containers"][0]
        role = own.removeprefix("baton-")
        assert first["args"][0] == role
        if role == "router":
            assert "--router-id=$(POD_NAME)" in first["args"]
            (line,) = lines_in([{"image": "baton:", "args": first["args"]}])
            ends_s = take_through_the_cli(line).timeouts.shutdown_s
        else:
            assert "--node-id=$(POD_NAME)" in first["args"]
            parts = drained(pod).parts
            assert parts.node.router == ("dns://baton-inside.baton.svc:7001",)
            assert (parts.node.bind_port, parts.probe.ready_port) == (ports(pod)["pages"], ports(pod)["ready"])
            ends_s = parts.node.drain_s
        pauses = [one.get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}}) for one in pod["spec"]["containers"]]
        pause_s = max(pause["preStop"]["sleep"]["seconds"] for pause in pauses)
        assert ends_s + pause_s < pod["spec"]["terminationGracePeriodSeconds"]


def test_the_readme_s_commands_make_what_the_chart_wants() -> None:
    made = set(re.findall(r"create (?:secret \w+|configmap) ([\w-]+)", README))
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text("utf-8"))
    assert made == {*values["secrets"].values(), values["caConfigMap"]}
    assert values["monitoring"]["credentials"]["name"] in made
    volumes = [volume for pod in pods("everything").values() for volume in pod["spec"]["volumes"]]
    wanted = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    assert wanted | {values["caConfigMap"]} == made
    for file in ("api.key", "admin.key", "ca.crt", "tls.crt", "tls.key"):
        assert file in README


def test_as_many_have_keys_as_may_be_started() -> None:
    (_, ours) = (line for line in lines_of(LAUNCH / "README.md") if line[:2] == ["keys", "create"])
    made = take_through_the_cli(ours)
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text("utf-8"))
    assert made.router == [f"baton-router-{i}" for i in range(values["router"]["replicas"])]
    most = {role: values[role]["scaling"]["maxReplicas"] for role in ("prefill", "decode")}
    assert made.node == [f"baton-{role}-{i}" for role, number in most.items() for i in range(number)]
    assert all(values[role]["replicas"] <= number for role, number in most.items())


def test_scalers_ask_for_what_there_is_and_own_the_numbers() -> None:
    scalers = {title(one): one["spec"] for one in of_kind("everything", "ScaledObject")}
    assert scalers.keys() == {"baton-prefill", "baton-decode"}
    for one in of_kind("everything", "StatefulSet"):
        assert ("replicas" in one["spec"]) == (title(one) not in scalers)
    for own, scaler in scalers.items():
        assert scaler["scaleTargetRef"]["name"] == own and scaler["minReplicaCount"] <= scaler["maxReplicaCount"]
        asked = [trigger["metadata"]["query"] for trigger in scaler["triggers"]]
        assert len(asked) == 2 and [queries.faults(query) for query in asked] == [[], []]
        quantiles = [query for query in asked if "quantile" in query]
        assert all(query.endswith(">= 0) or vector(0)") for query in quantiles)  # never NaN
        assert bool(quantiles) == (own == "baton-prefill")


def test_prometheus_and_gateways_find_the_routers() -> None:
    (monitor,) = of_kind("everything", "PodMonitor")
    router = pods("everything")["baton-router"]
    assert monitor["spec"]["selector"]["matchLabels"] == router["metadata"]["labels"]
    (asked,) = monitor["spec"]["podMetricsEndpoints"]
    assert asked["port"] in ports(router) and asked["scheme"] == "https"
    services = {title(one): one["spec"] for one in of_kind("everything", "Service")}
    assert asked["tlsConfig"]["serverName"] in services
    (route,), (policy,) = of_kind("everything", "HTTPRoute"), of_kind("everything", "BackendTLSPolicy")
    (behind,) = route["spec"]["rules"][0]["backendRefs"]
    assert behind["port"] in {port["port"] for port in services[behind["name"]]["ports"]}
    assert [target["name"] for target in policy["spec"]["targetRefs"]] == [behind["name"]]
    assert not [one for name in ("plain", "hub", "volume") for one in of_kind(name, *EXTRAS)]


@everywhere
def test_network_policies_admit_what_is_dialled(name: str) -> None:
    (policy,) = of_kind(name, "NetworkPolicy")
    admitted = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    dialled = {number for pod in pods(name).values() for own, number in ports(pod).items() if own != "ready"}
    assert admitted == dialled
    open_to_all = [rule["ports"] for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert open_to_all == [[{"port": 8443}]]
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert all(labels.items() <= pod["metadata"]["labels"].items() for pod in pods(name).values())


@everywhere
def test_a_model_s_name_and_place_reach_all_processes(name: str) -> None:
    models = {
        "plain": None, "hub": "meta-llama/Llama-3.1-8B-Instruct",
        "volume": "/model/llama-3.1-8b", "everything": "/model/llama-3.1-8b",
    }  # fmt: skip
    for pod in pods(name).values():
        args = [arg for arg in pod["spec"]["containers"][0]["args"] if arg.startswith("--model=")]
        assert args == ([f"--model={models[name]}"] if models[name] else [])
    tokens = [one for one in dicts_in(objects(name)) if one.get("name") == "HF_TOKEN"]
    assert len(tokens) == (3 if name == "hub" else 0)
