"""Baton from its wheel: one name in site-packages, beside other people's packages with the names of ours, and beside
another clone. Whatever lies in the current directory or in PYTHONPATH, all processes run their parent's code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest

from shared.core.sampling_params import SamplingParams
from tests.support.clusters.chaos_cluster import Endpoint
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.clusters.metrics_page import total
from tests.support.clusters.procs import NodeProcess
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.house.install_lines import dry_run
from tests.support.machine.installed import (
    BESIDE,
    FOLDERS,
    ROOT,
    ROUTER,
    Environment,
    build_sdist,
    build_wheel,
    copy_sources,
    other_project,
    sources,
)  # fmt: skip
from tests.support.machine.patience import HANG_GUARD_S, ON_CPU
from tests.support.oracles.hashlm_reference import reference_stream
from tests.support.web.mixed_clients import text_of

PROMPT = "One name in site-packages. " * 4
FLAGS = ("--model", "hashlm", "--tp", "2", "--kv-bytes", "4MiB")
PACKED = re.compile(r"\.(py|typed)$|^router/static/|^shared/model/heads/|^deploy/tools/head/.*\.jsonl$")
# What a clone's modules print as they start: of the router, both nodes, and a rank other than 0.
STARTED = ("router/app.py", "prefill_node/app.py", "decode_node/app.py", "shared/ranks/process.py")
SPAWNED = """
import multiprocessing, sys
import baton_serve
baton_serve.put_code_first()
from shared.core import launcher
for kind in multiprocessing.get_all_start_methods():
    with multiprocessing.get_context(kind).Pool(1) as pool:
        print(kind, pool.apply(launcher.command, ("deploy.cli",))[2])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    return Environment(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    return other_project(tmp_path / "theirs")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """With the compiled kernels of this checkout. Modules of its processes print where they are."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / "clone" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "clone")
    for name in STARTED:
        file = tmp_path / "clone" / name
        future, rest = file.read_text().split("import annotations\n")
        file.write_text(f"{future}import annotations\nprint('code of', __file__)\n{rest}")
    return tmp_path / "clone"


def test_the_wheel_has_one_name_and_all_that_belongs_below_it(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"baton_serve"}
    ours = list(filter(PACKED.search, sources()))
    moved = [name if name.startswith("baton_serve/") else f"baton_serve/_code/{name}" for name in ours]
    assert sorted(names) == sorted(moved)


def test_a_source_distribution_has_all_that_a_wheel_needs(tmp_path: Path) -> None:
    with tarfile.open(build_sdist(tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert names >= {*filter(PACKED.search, sources()), *BESIDE}
    assert not [name for name in names if name.startswith(("tests", "build"))]


def test_it_serves_in_a_clone_and_beside_another_project(
    wheel: Path, clone: Path, hostile: Path, tmp_path: Path
) -> None:
    """A clone is the current directory, the other project is in PYTHONPATH. Afterwards pip leaves nothing behind."""
    env = Environment(tmp_path, wheel)
    env.use_kernels_of_checkout()
    place = {"cwd": clone, "env": env.variables(PYTHONPATH=str(hostile))}
    with baton_up(tmp_path / "up.log", *FLAGS, program=[str(env.bin / "baton")], **place) as cluster:
        body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S).json()
        expected = reference_stream([ord(char) - 32 for char in PROMPT], SamplingParams(16, temperature=0.0), 0, 16)
        assert answer["choices"][0]["text"] == text_of(expected)
        cluster.eventually(lambda: handoffs(cluster), "the router hears of the hand-off")
        assert "<html" in httpx.get(cluster.url, timeout=HANG_GUARD_S).text
        assert cluster.stop() == 0
    log = cluster.log_path.read_text()
    assert "code of" not in log and str(hostile) not in log
    env.uninstall()
    assert env.files() == env.before


def test_a_router_s_own_wheel_serves_with_nodes_of_the_whole(installed: Environment, tmp_path: Path) -> None:
    """It has no heads, and its environment neither torch nor numpy."""
    wheel = build_wheel(tmp_path, copy_sources(tmp_path / "source") / ROUTER)
    alone = Environment(tmp_path, wheel, ROUTER)
    names = {file.relative_to(alone.site).as_posix() for file in alone.files() if file.is_relative_to(alone.site)}
    assert not [name for name in names if "/heads/" in name] and "baton_serve/_code/router/app.py" in names
    assert not {"torch", "numpy", "numba"} & {path.name for path in (tmp_path / "dependencies").iterdir()}
    installed.use_kernels_of_checkout()
    router = RouterProcess(program=[str(alone.bin / "baton"), "router"])
    nodes = [
        NodeProcess(role, role, Endpoint(router.nodes), tmp_path, *ON_CPU, baton=[str(installed.bin / "baton")])  # type: ignore[arg-type]
        for role in ("prefill", "decode")
    ]
    try:
        eventually(lambda: httpx.get(f"{router.url}/ready", timeout=HANG_GUARD_S).json().get("pair"))
        body = {"model": "hashlm", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=HANG_GUARD_S).json()
        expected = reference_stream([ord(char) - 32 for char in PROMPT], SamplingParams(16, temperature=0.0), 0, 16)
        assert answer["choices"][0]["text"] == text_of(expected)
        eventually(lambda: router.metric('baton_handoffs_total{node="decode"}'))
        assert router.stop() == 0
    finally:
        for node in nodes:
            node.close()
        router.process.kill()


def test_a_clone_s_processes_are_the_clone_s(installed: Environment, clone: Path, tmp_path: Path) -> None:
    """Though the environment has the wheel."""
    place = {"cwd": clone, "env": installed.variables()}
    with baton_up(tmp_path / "up.log", *FLAGS, program=[installed.python, "-m", "deploy.cli"], **place) as cluster:
        log = cluster.log_path.read_text()
    assert set(re.findall(r"code of (\S+)", log)) == {str(clone / name) for name in STARTED}


def handoffs(cluster: Cluster) -> float:
    return total(cluster.metrics(), "baton_handoffs_total")


@pytest.mark.parametrize("program", ["bin/baton", "bin/python -m baton_serve"])
def test_the_command_starts_in_another_project(installed: Environment, hostile: Path, program: str) -> None:
    command = [str(installed.folder / program.split()[0]), *program.split()[1:], "up", "--help"]
    env = installed.variables(PYTHONPATH=str(hostile))
    done = subprocess.run(command, cwd=hostile, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "baton up" in done.stdout, done.stderr


def test_an_editable_installation_starts_in_another_project(hostile: Path) -> None:
    command = [str(Path(sys.executable).with_name("baton")), "up", "--help"]
    env = {**os.environ, "PYTHONPATH": str(hostile)}
    done = subprocess.run(command, cwd=hostile, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "baton up" in done.stdout, done.stderr


def test_multiprocessing_s_children_have_their_parent_s_path(
    installed: Environment, hostile: Path, tmp_path: Path
) -> None:
    (tmp_path / "spawned.py").write_text(f"if __name__ == '__main__':\n{SPAWNED}".replace("\n", "\n    "))
    env = installed.variables(PYTHONPATH=str(hostile))
    command = [installed.python, str(tmp_path / "spawned.py")]
    printed = subprocess.run(command, cwd=hostile, env=env, capture_output=True, text=True, check=True).stdout.split()
    file = installed.site / "baton_serve/_code/shared/core/launcher.py"
    assert {"spawn", "forkserver"} <= set(printed[::2]) and set(printed[1::2]) == {str(file)}


def test_pip_takes_the_line_that_names_a_missing_extra(installed: Environment, wheel: Path, tmp_path: Path) -> None:
    command = [str(installed.bin / "baton"), "ray", "status"]
    env = installed.variables()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    _, found, line = done.stderr.partition("; to install it, type: ")
    assert found and line.endswith(f" '{wheel}[ray]'\n"), done.stderr
    assert f"Processing {wheel}" in dry_run(line, "--no-deps", cwd=tmp_path)
