"""The drill's own conditions: where it can't run it says so, and where a tool is missing it names it."""

from __future__ import annotations

import os

import pytest

from tests.drill import namespaces, needs


def refused(*args: object) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_a_user_who_may_not_make_namespaces_hears_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "new_namespace", refused)
    assert needs.main() == needs.CANT_RUN_HERE
    assert "can't make network namespaces (Operation not permitted)" in capsys.readouterr().out


def test_another_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs.sys, "platform", "darwin")
    assert "Linux only" in needs.why_not_here()


def test_a_missing_tool_is_a_failure_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "why_not_here", str)
    monkeypatch.setattr(namespaces, "WHERE_TOOLS_ARE", ("/nowhere",))
    assert needs.main() == 1
    assert "apt-get install iproute2" in capsys.readouterr().err


def test_root_s_tools_are_found_whatever_path_says(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    tool = tmp_path / "ip"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(namespaces, "WHERE_TOOLS_ARE", ("/nowhere", os.fspath(tmp_path)))
    assert namespaces.ip_tool() == str(tool)
