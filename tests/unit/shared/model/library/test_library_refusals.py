"""Kinds of models that can't be served are refused in one sentence, by config.json alone: the weights are not read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import transformers

from shared.core import launcher
from shared.core.errors import ConfigError
from shared.core.exit_codes import EXIT_CONFIG
from shared.model.library import loading
from shared.model.library.kinds import NOT_SERVED, check_kind
from tests.support.house import surface
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.library_families import REFUSED, load, save, write_config

STATE = "keeps a state beside keys and values, which pages can't hold"
OWN_WAY = "attend in a way of their own, which can't read pages"
SENTENCES = {
    "bert": "BertForMaskedLM is not a network that continues a text",
    "bloom": f"the layers of bloom {OWN_WAY}",
    "lfm2": "lfm2 has layers of kind conv; pages hold only keys and values of chunked_attention, ",
    "mamba2": f"mamba2 {STATE}",
    "minimax": "minimax has layers of kind linear_attention; ",
    "mpt": f"the layers of mpt {OWN_WAY}",
    "pix2struct": "has no text model of type pix2struct",
    "qwen3_next": f"qwen3_next {STATE}",
    "rwkv": f"rwkv {STATE}",
}
# What README says is refused, and the types in the published config.json
FLAGSHIPS = {
    "Qwen3.5": ("qwen3_5", "qwen3_5_moe"),
    "Qwen3-Next": ("qwen3_next",),
    "DeepSeek V4": ("deepseek_v4",),
    "MiniMax-M3": ("minimax_m3_vl",),
    "Nemotron 3": ("nemotron_h",),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_that_can_t_be_served_is_refused_unread(name: str, tmp_path: Path) -> None:
    write_config(name, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(SENTENCES[name])):
        load(tmp_path)


# Of its published config.json: the library's default has no such layers.
SPARSE = {"minimax_m3_vl": {"text_config": {"num_hidden_layers": 2, "layer_types": ["minimax_m3_sparse"] * 2}}}


@pytest.mark.parametrize("kind", [kind for kinds in FLAGSHIPS.values() for kind in kinds])
def test_a_model_that_readme_calls_refused_is_refused(kind: str, tmp_path: Path) -> None:
    config = transformers.CONFIG_MAPPING[kind](**SPARSE.get(kind, {}))
    config.architectures = None
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=f"{STATE}|has layers of kind"):
        load(tmp_path)


@pytest.mark.parametrize("kind", NOT_SERVED)
def test_a_kind_that_answers_no_text_alone_says_why(kind: str, tmp_path: Path) -> None:
    config = transformers.CONFIG_MAPPING[kind]()
    with pytest.raises(ConfigError, match=re.escape(f"{kind} {NOT_SERVED[kind]}")):
        check_kind(tmp_path, config)


def test_a_kind_with_an_encoder_is_no_text_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no text model of type bart"):
        check_kind(tmp_path, transformers.BartConfig())


def test_readme_names_the_models_whose_refusal_is_tested() -> None:
    (named,) = re.findall(r"\. Refused: (.*), images \|", (surface.ROOT / "README.md").read_text("utf-8"))
    assert named.split(", ") == [*FLAGSHIPS]


def test_a_node_says_the_sentence_and_ends(tmp_path: Path) -> None:
    """`baton up` shows what its nodes say, and starts none again that ends so."""
    write_config("bloom", tmp_path)
    command = launcher.command("deploy.cli", "decode", "--model", str(tmp_path), "--device", "inline")
    node = subprocess.run(
        [*command, "--router", "ipc:///nobody"], check=False, capture_output=True, text=True, timeout=HANG_GUARD_S
    )
    assert node.returncode == EXIT_CONFIG
    assert node.stderr.splitlines()[-1] == f"baton decode: {tmp_path}: {SENTENCES['bloom']}"


@pytest.mark.parametrize("name", ["lfm2", "bloom"])
def test_layers_of_unknown_kinds_that_keep_states_are_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version of the library may have kinds of layers that we don't know."""
    monkeypatch.setattr(loading, "check_kind", lambda folder, config: None)
    save(name, tmp_path)
    silent = r"3 of 4 layers \(0, 1, 3\)" if name == "lfm2" else r"4 of 4 layers \(0, 1, 2, 3\)"
    with pytest.raises(ConfigError, match=f"{silent} do not call attention: they keep a state"):
        load(tmp_path)
