"""Commands with a model by name: each fetches it first and goes on with a path. A local model costs nothing of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy import cli
from deploy.cluster import local
from deploy.hub import hub as hubs
from deploy.hub.local_model import local_path, with_local_model, with_local_text, with_pinned_model
from deploy.tools.head import evaluate as head_evaluate
from deploy.tools.plan import measure as plan_measure
from deploy.tools.plan import profile as profiles
from deploy.tools.prove import command as prove
from shared.config.processes import ClusterConfig, NodeParts, NodeProcessConfig, RouterProcessConfig
from shared.config.settings.hub_settings import HubConfig
from shared.config.settings.settings import ModelConfig
from shared.core import launcher
from shared.core.errors import ConfigError
from tests.support.web.hub_rig import NAME, WEIGHTS, HubRig, hub_rig, tiny_repo
from tests.support.worlds import plan_cases

ROOT = Path(__file__).parents[4]
NODES = NodeParts(model=ModelConfig(model=NAME, dtype="float32"))
RAY_UP = """
import sys
from dataclasses import replace
from deploy.ray import session
from shared.config.processes import RayClusterConfig
from shared.config.settings.ray_settings import RayConfig

def fetching(how):
    return lambda nodes: replace(nodes, model=replace(nodes.model, model=how))

def reach(config):
    print(config.nodes.model.model)
    sys.exit()

session.with_local_model, session.with_pinned_model, session.reach = fetching("local"), fetching("pinned"), reach
session.up(RayClusterConfig(ray=RayConfig(address=sys.argv[1])))
"""
LOADED = """
import sys
from deploy import cli
from deploy.hub.local_model import local_path
assert local_path("smollm2") == "smollm2"
cli.make_parser()
print(*sorted({"huggingface_hub", "httpx2", "tqdm"} & {name.partition(".")[0] for name in sys.modules}))
"""


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRig]:
    with hub_rig(tmp_path, monkeypatch) as made:
        made.state.add(NAME, tiny_repo(tmp_path / "tiny"))
        monkeypatch.setattr(hubs, "hub_of_environment", lambda offline: replace(made.hub, offline=offline))
        yield made


def test_a_served_name_that_was_given_stays(rig: HubRig) -> None:
    nodes = replace(NODES, model=replace(NODES.model, model=f"{NAME}@main", served_model_name=("mine",)))
    assert with_local_model(nodes).model.public_name == "mine"


def test_a_router_by_itself_fetches_no_weights(rig: HubRig) -> None:
    router = with_local_text(RouterProcessConfig(model=NODES.model))
    assert WEIGHTS not in rig.state.taken_paths()
    assert router.model.public_name == NAME
    assert Path(router.model.model, "tokenizer.json").is_file()


def test_machines_that_fetch_by_themselves_are_given_the_commit(rig: HubRig) -> None:
    pinned = with_pinned_model(NODES).model
    assert pinned.model == f"{NAME}@{rig.state.repos[NAME].branches['main']}"
    assert pinned.public_name == NAME
    assert rig.state.taken == []
    rig.state.repos[NAME].push({"config.json": b"{}"})
    assert Path(local_path(pinned.model), WEIGHTS).is_file()


def test_what_is_no_name_stays_as_it_is() -> None:
    nodes, router = NodeParts(), RouterProcessConfig()
    assert with_local_model(nodes) is nodes
    assert with_pinned_model(nodes) is nodes
    assert with_local_text(router) is router


def test_offline_travels_from_the_flag_to_the_hub(rig: HubRig) -> None:
    nodes = replace(NODES, hub=HubConfig(offline=True))
    with pytest.raises(ConfigError, match="offline"):
        with_local_model(nodes)
    assert rig.state.asked == []


def test_up_tells_the_log_the_name_and_the_children_the_path(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def supervisor(specs: list[local.ChildSpec], *args: object, **kwargs: object) -> SimpleNamespace:
        started.extend(word for spec in specs for word in spec.argv if word.startswith("--model="))
        return SimpleNamespace(run=lambda: 0)

    monkeypatch.setattr(local, "Supervisor", supervisor)
    config = ClusterConfig(nodes=NODES)
    assert local.run(replace(config, router=replace(config.router, port=0)), os.getpid()) == 0
    assert f"model={NAME} " in capsys.readouterr().err
    assert started == [f"--model={local_path(NAME)}"] * 3


def test_prove_gives_its_clusters_the_path(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(prove, "chosen_cells", lambda cells: seen.append(cells) or [])
    monkeypatch.setattr(prove, "address_of", None)
    args = cli.make_parser().parse_args(["prove", "--model", NAME])
    prove.run(args)
    assert args.model == local_path(NAME)


def test_plan_measures_the_path_and_its_profile_keeps_the_name(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []

    def measure(config: NodeProcessConfig, *args: object) -> profiles.Profile:
        seen.append(config.parts.model.model)
        assert config.parts.sched.device == "cpu", "its cluster would take GPUs"
        return replace(plan_cases.profile(), model=config.parts.model.model)

    monkeypatch.setattr(plan_measure, "measure", measure)
    out = tmp_path / "profile.json"
    assert cli.main(["plan", "measure", "--model", NAME, "--out", str(out)]) == 0
    assert seen == [local_path(NAME)]
    assert profiles.read(out).model == NAME


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize(("address", "fetched"), [("", "local"), ("10.0.0.1:6379", "pinned")])
def test_ray_fetches_on_one_machine_and_pins_on_several(address: str, fetched: str) -> None:
    """Ray is imported in another process: it puts its own copies of other packages on sys.path."""
    done = subprocess.run([sys.executable, "-c", RAY_UP, address], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == fetched + "\n", done.stderr


def test_head_works_on_the_path(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(head_evaluate, "evaluate", lambda config: seen.append(config.target.model))
    assert cli.main(["head", "evaluate", "--model", NAME]) == 0
    assert seen == [local_path(NAME)]


def test_a_local_model_loads_nothing_of_the_hub() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_the_command_says_one_sentence(tmp_path: Path, rig: HubRig) -> None:
    """In a process of its own: the library reads the environment as it loads."""
    own = {"HF_ENDPOINT": rig.hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}
    command = launcher.command("deploy.cli", "router", "--model", "tiny-org/other")
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("baton router: --model tiny-org/other: there is no such file or folder")
    assert rig.hub.endpoint in done.stderr and done.stderr.count("\n") == 1
    offline = subprocess.run([*command[:-1], NAME, "--offline"], cwd=ROOT, env=own, capture_output=True, text=True)
    assert offline.returncode == 2
    assert offline.stderr.startswith(f"baton router: --model {NAME}: offline, and the cache ")
    assert str(tmp_path / "home" / "hub") in offline.stderr and offline.stderr.count("\n") == 1
