"""Links, anchors, files and commands that our pages name are there; each check refuses its example."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from router.policy.interface import Reason, Wanted
from tests.support.house import doc_links
from tests.support.worlds.router_rig import RouterRig

PAGES = doc_links.pages()
IDS = [page.relative_to(doc_links.ROOT).as_posix() for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_names_what_is_there(page: Path) -> None:
    wrong = [*doc_links.wrong_links(page), *doc_links.wrong_files(page), *doc_links.wrong_commands(page)]
    assert not wrong, "\n".join(wrong)


def test_the_pages_are_those_of_the_checkout() -> None:
    assert {"README.md", "docs/structure.md", "docs/adr/README.md"} <= set(IDS)
    assert not any(name.startswith((".venv", "build")) for name in IDS)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("[a](page.md)", 0),
        ("[a](page.md#one-two)", 0),
        ("[a](#again)", 0),
        ("[a](#again-1)", 0),
        ("[a](https://example.org/x#y)", 0),
        ("`[a](gone.md)`", 0),
        ("```\n[a](gone.md)\n```", 0),
        ("[a](gone.md)", 1),
        ("[a](page.md#gone)", 1),
        ("[a](#again-2)", 1),
        ("[a](code.py#one-two)", 1),
    ],
)
def test_links_and_anchors(tmp_path: Path, text: str, refused: int) -> None:
    (tmp_path / "page.md").write_text("# `One` two!\n")
    (tmp_path / "code.py").write_text("# One two\n")
    page = tmp_path / "this.md"
    page.write_text(f"## Again\n\n```\n## No heading\n```\n\n## Again\n\n{text}\n")
    assert len(list(doc_links.wrong_links(page))) == refused


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("`shared/kv/pages.py`", 0),
        ("`tests/unit/shared/kv/test_kv_*.py`", 0),
        ("`shared/kv/`", 0),
        ("`test_doc_links.py`", 0),
        ("`some/other/file.py`", 0),
        ("`shared/kv/gone.py`", 1),
        ("`tests/unit/test_gone_*.py`", 1),
        ("`test_gone.py`", 1),
    ],
)
def test_files(tmp_path: Path, text: str, refused: int) -> None:
    page = tmp_path / "this.md"
    page.write_text(text)
    assert len(list(doc_links.wrong_files(page))) == refused


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("```\nbaton up --decode 2   # two\n```", 0),
        ("```sh\nx=1 baton router \\\n  --port 8000 && baton load http://127.0.0.1:8000\n```", 0),
        ("```python\nbaton up --no-such-flag\n```", 0),
        ("```\nbaton up --no-such-flag\n```", 1),
        ("```sh\nbaton decode --port eight\n```", 1),
        ("```\nbaton doctor --help\n```", 0),
    ],
)
def test_commands(tmp_path: Path, text: str, refused: int) -> None:
    page = tmp_path / "this.md"
    page.write_text(text)
    assert len(list(doc_links.wrong_commands(page))) == refused


def test_the_policy_of_the_page_works(tmp_path: Path) -> None:
    """docs/adding-a-policy.md: the class in its code block is loaded and picks nodes."""
    text = (doc_links.ROOT / "docs" / "adding-a-policy.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 30
    (tmp_path / "two_choices.py").write_text(code)
    spec = importlib.util.spec_from_file_location("two_choices", tmp_path / "two_choices.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    policy, rig = module.TwoChoices(), RouterRig()
    nodes = [rig.join("decode", name) for name in "abc"]
    assert policy.pick(nodes[:1], Wanted()).reason is Reason.ONLY
    nodes[0].ours.open_sequences = 9
    assert {policy.pick(nodes, Wanted()).node.node_id for _ in range(50)} == {"b", "c"}
