"""What mypy leaves unchecked: no module of ours, and few single lines, each with its error code and a reason."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ["baton_serve", "shared", "router", "prefill_node", "decode_node", "deploy"]
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

MOST_IGNORES = 12
UNCHECKED: set[str] = set()  # modules under ignore_errors
LOOSER = {"disallow_untyped_calls": False}  # what an override may say of our modules: torch's methods carry no types
# In a package of Triton kernels: they have no types for mypy. test_frame_rules sees that all other functions have.
KERNELS = "shared.gpu_kernel.*"
NO_TYPES = {f"disallow_{what}": False for what in ("untyped_decorators", "untyped_defs", "incomplete_defs")}
FOREIGN = {"ignore_missing_imports": True, "implicit_reexport": True}  # and of others'

IGNORE = re.compile(r"#\s*type:\s*ignore(?P<code>\[[a-z-]+(?:,\s*[a-z-]+)*\])?(?P<reason>\s+#\s*\w.*)?")
SWITCH = re.compile(r"#\s*mypy:|\bno_type_check\b")  # of a whole file or function


def ignores(text: str) -> Iterator[tuple[int, bool]]:
    """Line number of each ignore, and whether it has a code and a reason: behind it, or in the line above."""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if found := IGNORE.search(line):
            above = lines[number - 2].strip() if number > 1 else ""
            explained = found["reason"] or (above.startswith("#") and not IGNORE.search(above))
            yield number, bool(found["code"] and explained)


def overrides(key: str) -> dict[str, Any]:
    """Modules or patterns that have this setting, with its value."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    found = {}
    for override in config["overrides"]:
        named = override["module"]
        found.update(
            {name: override[key] for name in ([named] if isinstance(named, str) else named) if key in override}
        )
    return found


def is_ours(module: str) -> bool:
    return module.split(".")[0] in [*PACKAGES, "*"]


def test_ignores_are_few_and_each_has_a_code_and_a_reason():
    found = {f"{file.relative_to(ROOT)}:{n}": good for file in SOURCES for n, good in ignores(file.read_text("utf-8"))}
    assert not [place for place, good in found.items() if not good]
    assert len(found) <= MOST_IGNORES, sorted(found)


@pytest.mark.parametrize(
    ("code", "good"),
    [
        ("x = f()  # type: ignore", False),
        ("x = f()  # type: ignore  # f has no types", False),
        ("x = f()  # type: ignore[misc]", False),
        ("x = f()  #type:ignore[misc]", False),
        ("y = g()\nx = f()  # type: ignore[misc]", False),
        ("y = g()  # type: ignore[misc]  # of g\nx = f()  # type: ignore[misc]", False),
        ("x = f()  # type: ignore[misc]  # f has no types", True),
        ("x = f()  # type: ignore[misc, no-any-return]  # f has no types", True),
        ("    # f has no types.\n    x = f()  # type: ignore[misc]", True),
    ],
)
def test_an_ignore_without_code_or_reason_is_found(code, good):
    assert list(ignores(code))[-1][1] == good


def test_no_file_or_function_switches_checking_off():
    assert not [str(file.relative_to(ROOT)) for file in SOURCES if SWITCH.search(file.read_text("utf-8"))]
    assert SWITCH.search("# mypy: ignore-errors") and SWITCH.search("@typing.no_type_check")


def test_mypy_looks_at_all_modules_and_is_strict():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    assert config["strict"] is True and sorted(config["packages"]) == sorted([*PACKAGES, "stream_conformance"])
    assert not config.keys() & {"exclude", "ignore_errors", "disable_error_code", "follow_imports"}
    assert {module for module, off in overrides("ignore_errors").items() if off} == UNCHECKED


def test_overrides_loosen_nothing_else():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mypy"]
    keys = {key for override in config["overrides"] for key in override} - {"module", "ignore_errors"}
    for key in keys:
        for module, value in overrides(key).items():
            ours = LOOSER | NO_TYPES if module == KERNELS else LOOSER
            assert (ours if is_ours(module) else FOREIGN).get(key) == value, f"{module}: {key}"
