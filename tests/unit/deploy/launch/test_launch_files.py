"""The files for other launchers: what they call exists, and what they refer to in each other, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import baton_serve
from deploy.cluster.admin import table
from shared.config.load import load
from shared.config.models.model_path import DEFAULT_REQUIREMENT
from shared.config.processes import NodeProcessConfig, RouterProcessConfig
from shared.core.exit_codes import EXIT_CONFIG, EXIT_DRAINED
from tests.support.house.launch_lines import (
    CONFIG,
    LAUNCH,
    documents,
    lines_of,
    read_unit,
    take_through_the_cli,
)
from tests.support.machine.installed import FOLDERS

ROOT = LAUNCH.parents[1]
DOCKER, PROXY = LAUNCH / "docker", LAUNCH / "helm" / "baton" / "files" / "nginx.conf"
COMPOSE = DOCKER / "compose.yaml"
UNITS = sorted((LAUNCH / "systemd").iterdir())

# the images -> torch's pin, and the folder that is installed
IMAGES = {"router": ("", "./deploy/router"), "node": ("torch=={}+cpu", "."), "node-cuda": ("torch=={}", ".")}
# file -> its `baton` lines: a line that is not found is not checked
LINES = {
    "README.md": 5,
    "docker/compose.yaml": 5,
    "slurm/baton.sbatch": 3,
    "systemd/baton-decode@.service": 1,
    "systemd/baton-prefill@.service": 1,
    "systemd/baton-router.service": 1,
}
WITHOUT = {
    "baton.toml", "docker/Dockerfile", "docker/Dockerfile.dockerignore", "prometheus/alerts.yaml",
    "prometheus/prometheus.yml",
}  # fmt: skip
ELSEWHERE = ("helm/baton/", "prometheus/dashboards/")  # test_launch_chart.py, test_launch_prometheus.py


def all_files() -> set[str]:
    names = {path.relative_to(LAUNCH).as_posix() for path in LAUNCH.rglob("*") if path.is_file()}
    return {name for name in names if not name.startswith(ELSEWHERE)}


def test_every_file_is_known_here() -> None:
    assert all_files() == set(LINES) | WITHOUT


@pytest.mark.parametrize("name", sorted(LINES))
def test_every_baton_line_is_one_that_the_cli_takes(name: str) -> None:
    lines = lines_of(LAUNCH / name)
    assert len(lines) == LINES[name], lines
    for line in lines:
        take_through_the_cli(line)


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
    node = load(NodeProcessConfig, {}, CONFIG, {"node": {"role": "decode"}}).parts.node
    shutdown_s = load(RouterProcessConfig, {}, CONFIG).timeouts.shutdown_s
    assert int(service["TimeoutStopSec"]) > (shutdown_s if is_router else node.drain_s)
    stays_down = {EXIT_CONFIG} if is_router else {EXIT_CONFIG, EXIT_DRAINED}
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == stays_down
    assert is_router or int(service["SuccessExitStatus"]) == EXIT_DRAINED
    assert service["Type"] == "notify" and int(service["WatchdogSec"]) > node.silence_s
    assert service["User"] != "root" and service["NoNewPrivileges"] == "yes"
    assert "PrivateUsers" not in service and "MemoryDenyWriteExecute" not in service


def stages() -> dict[str, str]:
    """The Dockerfile's stages by name, each with the text of those that it begins with."""
    found: dict[str, str] = {}
    for part in re.split(r"^FROM ", (DOCKER / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)[1:]:
        base, name = re.match(r"(\S+) AS (\S+)\n", part).groups()  # type: ignore[union-attr]
        assert base == "${FROM}" or base in found
        found[name] = found.get(base, "") + re.sub(r"^\s*#.*\n", "", part, flags=re.MULTILINE)
    return found


def test_the_images_have_what_they_need_in_the_pinned_versions() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    known = stages()
    assert set(IMAGES) < set(known)
    for name, (torch, origin) in IMAGES.items():
        build, runs = known[f"build-{name}"], known[name]
        assert re.findall(r'"(torch==[^"]+)"', build) == [torch.format(pins["torch"])] * bool(torch)
        assert f'--no-deps "{DEFAULT_REQUIREMENT}"' in build
        assert f"--constraint constraints.txt {origin}" in build and (ROOT / origin / "pyproject.toml").is_file()
        assert f"COPY --from=build-{name} /opt/baton /opt/baton" in runs and 'ENTRYPOINT ["baton"]' in runs
        assert re.findall(r"^USER (\S+)$", runs, re.MULTILINE)[-1] == "10001:10001"
        (command,) = re.findall(r'^CMD \["(\w+)"\]$', runs, re.MULTILINE)
        take_through_the_cli([command])


def test_the_images_are_built_from_what_belongs_to_baton() -> None:
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    names = {line[1:] for line in ignored if line.startswith("!")}
    assert names == set(FOLDERS) | {"constraints.txt", "pyproject.toml", "README.md", "LICENSE"} and "*" in ignored
    assert all((ROOT / name).exists() for name in names)


def test_everybody_means_the_same_image() -> None:
    text = "".join(path.read_text("utf-8") for path in LAUNCH.rglob("*") if path.is_file())
    versions = {version for version in re.findall(r"\bbaton(?:-router|-cuda)?:([\d.]+\d)", text)}
    assert versions == {baton_serve.__version__}


def compose() -> dict[str, Any]:
    (found,) = documents(COMPOSE)
    return found


def test_compose_refers_to_what_is_there() -> None:
    whole = compose()
    services, volumes = whole["services"], set(whole["volumes"])
    known = {
        "image", "build", "profiles", "network_mode", "volumes", "command", "secrets", "networks", "ports", "restart",
        "stop_grace_period", "init", "healthcheck", "depends_on", "cpuset", "read_only", "tmpfs",
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
    for service in (one for name, one in services.items() if name != "tls"):
        build, is_router = service["build"], service is services["router"]
        assert (DOCKER / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).exists()
        assert build["target"] == ("router" if is_router else "node")
        assert service["image"] == f"baton{'-router' if is_router else ''}:{baton_serve.__version__}"
        assert service["read_only"] and service["tmpfs"] == ["/tmp"]


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


def test_as_many_nodes_have_keys_as_units_are_enabled() -> None:
    (systemd, _) = (line for line in lines_of(LAUNCH / "README.md") if line[:2] == ["keys", "create"])
    made = take_through_the_cli(systemd)
    units = re.search(r"enable --now baton-router (.*)", (LAUNCH / "README.md").read_text("utf-8"))
    assert units and set(made.node) == set(units[1].replace("baton-", "").replace("@", "-").split())
    assert made.router == ["router"]


def test_baton_admin_prints_nodes_that_do_not_work_together() -> None:
    cut = {"prefill": "prefill-1", "decode": "decode-1", "endpoint": "tcp://10.0.0.2:7002", "since_s": 12.4, "tries": 3}
    stranger = {"node": "decode-2", "role": "decode", "protocol": 12, "ours": 13}
    apart = {"a": "decode-1", "b": "prefill-0", "differs": "numerics"}
    status = {"open_requests": 0, "nodes": [], "unreachable": [cut], "strangers": [stranger], "misfits": [apart]}
    printed = table(status).splitlines()
    assert "prefill-1 -> decode-1  can't connect to tcp://10.0.0.2:7002, for 12 s" in printed
    assert "decode-2 speaks protocol 12, this router 13: it gets no requests" in printed
    assert "decode-1 and prefill-0 do not pair: numerics differs" in printed


def test_the_proxy_shows_clients_neither_admin_nor_metrics() -> None:
    text = PROXY.read_text("utf-8")
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
