"""The rules of the house that ruff and mypy lack. Each rule has an example that it must refuse."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.config.load import all_concerns

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("baton_serve", "router", "prefill_node", "decode_node", "shared", "deploy")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
TESTS = sorted(file for folder in ("benchmarks", "tests") for file in (ROOT / folder).rglob("*.py"))
APART = sorted((ROOT / "conformance").rglob("*.py"))  # a package of its own
ASSETS = sorted(
    f for p in PACKAGES for e in ("js", "css", "html", "cpp", "cu", "h") for f in (ROOT / p).rglob(f"*.{e}")
)

MAX_FUNCTION = 60
MAX_FILE, MAX_TEST_FILE, MAX_ASSET = 400, 600, 800

BANNED_NAMES = {"__import__"}
BANNED_ATTRIBUTES = {"recv_pyobj", "send_pyobj", "allow_pickle"}

Rule = Callable[[ast.AST], Iterator[str]]


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def long_functions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def dangerous(tree: ast.AST) -> Iterator[str]:
    """What turns bytes or text into code, beside the calls and modules that ruff bans."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BANNED_NAMES:
            yield f"{node.lineno}: {node.id}"
        if isinstance(node, ast.keyword) and node.arg in BANNED_ATTRIBUTES:
            yield f"{node.value.lineno}: passes {node.arg}"
        if isinstance(node, ast.Attribute) and node.attr in BANNED_ATTRIBUTES:
            yield f"{node.lineno}: uses {node.attr}"


def is_triton(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """What @triton.jit compiles: it reads the parameters' annotations in its own way."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def untyped(tree: ast.AST) -> Iterator[str]:
    """Every argument and every result has a type; `self` and `cls` need none, nor do Triton's kernels."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_triton(node):
            continue
        given = node.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        missing = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls", "_")]
        if missing or node.returns is None:
            yield f"{node.lineno}: {node.name}({', '.join(missing)})"


def started_with_m(tree: ast.AST) -> Iterator[str]:
    """`python -m` may find another copy of a module of ours; `launcher.command` does not."""
    for node in ast.walk(tree):
        words = getattr(node, "elts", getattr(node, "args", []))
        texts = [getattr(word, "value", None) for word in words] if isinstance(words, list) else []
        for flag, module in zip(texts, texts[1:], strict=False):
            if flag == "-m" and str(module).partition(".")[0] in PACKAGES:
                yield f"{node.lineno}: -m {module}"


RULES: dict[str, tuple[Rule, str]] = {
    "functions are short": (long_functions, "def f():\n" + "    x = 1\n" * MAX_FUNCTION),
    "nothing turns bytes into code": (dangerous, "socket.recv_pyobj()"),
    "everything is typed": (untyped, "def f(a) -> None: ..."),
    "modules of ours are started by the launcher": (started_with_m, "run([python, '-m', 'deploy.cli', 'up'])"),
}


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    rule, _ = RULES[name]
    found = [f"{relative(file)}:{text}" for file in SOURCES for text in rule(ast.parse(file.read_text("utf-8")))]
    assert not found, f"{name}:\n" + "\n".join(found)


@pytest.mark.parametrize("name", RULES)
def test_rule_refuses_its_example(name):
    rule, example = RULES[name]
    assert list(rule(ast.parse(example)))


@pytest.mark.parametrize("code", ["__import__('x')", "socket.recv_pyobj()", "f(allow_pickle=True)"])
def test_dangerous_ways_are_known(code):
    assert list(dangerous(ast.parse(code)))


LINTED = {
    "import pickle": "TID251",
    "from multiprocessing import connection": "TID251",
    "import numpy as np\n\nnp.load('x')": "TID251",
    "import torch\n\ntorch.load('x')": "TID251",
    "from os import getenv": "TID251",
    "import os\n\nos.environ['A']": "TID251",
    "eval('1')": "S307",
    "exec('1')": "S102",
    "def f():\n    global x\n    x = 1": "PLW0603",
    "try:\n    x = 1\nexcept:\n    pass": "E722",
    "# TO" + "DO: later": "FIX002",
    "x = 1": "I002",
    "": "",
}


@pytest.mark.parametrize(("code", "rule"), LINTED.items())
def test_ruff_is_told_the_house_s_rules(code, rule):
    """The name is of a product file: ignores for tests and examples leave it alone."""
    head = "" if rule == "I002" else '"""A module."""\n\nfrom __future__ import annotations\n\n'
    ruff = (
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--stdin-filename",
        "shared/core/one.py",
        "--output-format=concise",
        "-",
    )
    done = subprocess.run(ruff, cwd=ROOT, input=head + code + "\n", capture_output=True, text=True, check=False)
    assert (f" {rule} " in done.stdout) if rule else "All checks passed" in done.stdout, done.stdout + done.stderr


def test_test_functions_are_short_too():
    found = [
        f"{relative(file)}:{text}"
        for file in TESTS + APART
        for text in long_functions(ast.parse(file.read_text("utf-8")))
    ]
    assert not found, found


@pytest.mark.parametrize(("files", "limit"), [(SOURCES + APART, MAX_FILE), (TESTS, MAX_TEST_FILE), (ASSETS, MAX_ASSET)])
def test_files_are_short(files, limit):
    lengths = {relative(file): len(file.read_text("utf-8").splitlines()) for file in files}
    assert not {name: length for name, length in lengths.items() if length > limit}


def test_no_method_is_left_for_later():
    mark = "raise NotImplemented" + "Error"
    assert not [relative(file) for file in SOURCES + TESTS + APART if mark in file.read_text("utf-8")]


def test_names_of_modules():
    junk = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    assert not [relative(file) for file in SOURCES if file.name in junk or file.parent.name in ("utils", "common")]
    assert not set(PACKAGES) & set(sys.stdlib_module_names)
    assert not [relative(file) for file in TESTS if file.name == "__init__.py"]
    assert [file.name for file in (ROOT / "shared").glob("*.py")] == ["__init__.py"]


def test_the_package_list_is_the_folders():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    folders = sorted({relative(file.parent) for file in SOURCES})
    assert [name.replace(".", "/").removeprefix("baton_serve/_code/") for name in listed] == folders
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders)


TORCH_FREE = ("router", "shared/core", "shared/config", "shared/observe", "shared/wire", "deploy")
WITH_TORCH = (
    "deploy/tools/certify/formats.py",
    "deploy/tools/certify/replay.py",
    "deploy/tools/head/",
    "deploy/tools/models/look.py",
    "deploy/tools/plan/",
    "deploy/tools/prove/layers.py",
    "deploy/tools/doctor/look_gpu.py",
    "deploy/tools/doctor/read_shared.py",
)  # loaded when what was typed needs it
COMMAND_LINE = tuple(f"deploy/tools/{name}.py" for name in ("head/command", "head/settings", "plan/options"))
LOAD_ALL = "import importlib, sys; [importlib.import_module(n) for n in sys.argv[1:]]; print('torch' in sys.modules)"


def loads_torch(modules: list[str]) -> bool:
    command = [sys.executable, "-c", LOAD_ALL, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "True"


def test_the_router_never_loads_torch():
    names = [relative(file) for file in SOURCES if file.name != "__init__.py"]
    names = [n for n in names if n.startswith(TORCH_FREE) and not n.startswith(WITH_TORCH)]
    modules = [name.removesuffix(".py").replace("/", ".") for name in (*names, *COMMAND_LINE)]
    assert "router.app" in modules and not loads_torch(modules)


def test_a_module_that_loads_torch_is_noticed():
    assert loads_torch(["shared.kv.layout"])


def settings_read() -> set[str]:
    """Names of attributes that anything outside shared/config reads."""
    files = [file for file in SOURCES if not relative(file).startswith("shared/config/")]
    trees = [ast.parse(file.read_text("utf-8")) for file in files]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_setting_does_something():
    """A flag that nobody reads is a lie to whoever sets it. The core plan is read where it is applied, by config, and
    --plain-http where config checks addresses."""
    read = settings_read() | {"threads", "cpus", "wait_policy", "plain_http"}
    indirect = {"served_model_name": "public_names", "spec_width": "width", "lora": "adapters"}
    indirect |= {"chat_template_kwargs": "template_kwargs"}
    for settings in all_concerns().values():
        for field in dataclasses.fields(settings):
            assert indirect.get(field.name, field.name) in read, f"{settings.__name__}.{field.name}"
