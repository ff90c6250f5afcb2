"""A hub on loopback, a cache of one's own, and a tiny model in it: what the tests of deploy/hub begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import huggingface_hub
import pytest
import tokenizers
from huggingface_hub import constants
from tokenizers import decoders, models, pre_tokenizers

from deploy.hub.fetch import fetch
from deploy.hub.hub import Hub
from deploy.hub.name import HubName, parse_hub_name
from shared.core.errors import ConfigError
from tests.support.models.tiny_llama import VOCAB, write_tiny_llama
from tests.support.web.hub_server import HubServer, HubState, files_of, running_hub

NAME = "tiny-org/tiny-llama"
WEIGHTS = "model.safetensors"


@dataclass(slots=True)
class HubRig:
    """What is said while fetching is kept in `said`."""

    server: HubServer
    hub: Hub
    said: list[str] = field(default_factory=list)

    @property
    def state(self) -> HubState:
        return self.server.state

    def fetch(self, text: str = NAME, *, offline: bool = False, with_weights: bool = True) -> Path:
        hub = replace(self.hub, offline=offline)
        return fetch(named(text), hub, self.said.append, with_weights=with_weights)

    def refusal(self, text: str = NAME, *, offline: bool = False) -> str:
        """Fetching fails with this one sentence."""
        with pytest.raises(ConfigError) as refused:
            self.fetch(text, offline=offline)
        assert refused.value.message.startswith(f"--model {text}: ")
        assert "\n" not in refused.value.message
        return refused.value.message

    def cached(self) -> set[str]:
        """Names of the files that the cache's snapshots hold."""
        found = self.hub.cache.glob("models--*/snapshots/*/**/*")
        return {path.name for path in found if path.is_file()}


def named(text: str) -> HubName:
    name = parse_hub_name(text)
    assert name is not None
    return name


@contextlib.contextmanager
def hub_rig(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRig]:
    """This machine's own token, cache and settings have no say."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with running_hub() as server:
        try:
            yield HubRig(server, Hub(server.url, folder / "hf" / "hub"))
        finally:
            huggingface_hub.close_session()


def tiny_repo(folder: Path) -> dict[str, bytes]:
    """The files of a whole model, with some beside that nobody must fetch."""
    write_tiny_llama(folder)
    write_tokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    strange = {"pytorch_model.bin": b"pickle", "modeling_tiny.py": b"print('never')", "README.md": b"# Tiny"}
    return files_of(folder) | strange | {"original/consolidated.safetensors": b"twice"}


def write_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    inner = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
