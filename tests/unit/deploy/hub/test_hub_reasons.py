"""What is said when a model can't be fetched: one sentence each, which names what to do."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import file_download

from deploy.hub.files import TEXT, check_listing, matching
from deploy.hub.hub import hub_of_environment
from deploy.hub.name import HubName
from shared.core.errors import ConfigError
from tests.support.web.hub_rig import NAME, HubRig, hub_rig
from tests.support.web.hub_server import FORBIDDEN, GATED, PRIVATE, TOKEN

# None of the refusals below reads a file: texts will do.
SMALL = {name: b"{}" for name in ("config.json", "tokenizer.json", "model.safetensors")}
PARTS = [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRig]:
    with hub_rig(tmp_path, monkeypatch) as made:
        yield made


def test_a_name_that_is_not_there_may_have_been_a_path(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    message = rig.refusal()
    assert f"no such file or folder (looked at {Path(NAME).absolute()})" in message
    assert f"no such model at {rig.hub.endpoint}" in message and "needs HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "this token may not read it" in rig.refusal()


def test_a_private_model_needs_a_token(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.state.add(NAME, SMALL, access=PRIVATE)
    assert "it is private and needs HF_TOKEN" in rig.refusal()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    rig.fetch(with_weights=False)


def test_a_gated_model_needs_its_terms_accepted(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.state.add(NAME, SMALL, access=GATED)
    page = f"accept its terms at {rig.hub.endpoint}/{NAME}"
    assert f"it is gated: {page} and set HF_TOKEN" in rig.refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    assert f"the account of this token has no access: {page}" in rig.refusal()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    rig.fetch(with_weights=False)


def test_a_403_names_the_token(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.state.add(NAME, SMALL, access=FORBIDDEN)
    assert "refuses it (403): it needs a token: set HF_TOKEN" in rig.refusal()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "refuses it (403): the token is wrong or may not read it" in rig.refusal()


@pytest.mark.parametrize(
    ("files", "asked", "reason"),
    [
        ([*SMALL], "@v9", "the model has no revision 'v9'"),
        ([*SMALL], "@" + "0" * 40, "the model has no revision"),
        (["q4.gguf", "q8.gguf"], ":q5.gguf", "no file q5.gguf; its GGUF files: q4.gguf, q8.gguf"),
        ([PARTS[0], PARTS[2]], f":{PARTS[0]}", f"the repository lacks {PARTS[1]}, part 2 of 3"),
        (["config.json", "pytorch_model.bin"], "", "weights are pickles only"),
        (["config.json", "flax_model.msgpack"], "", "no *.safetensors file"),
        (["q4.gguf"], "", f"name one, as {NAME}:q4.gguf"),
        (["model.safetensors", "tokenizer.json"], "", "no config.json"),
        (["model.safetensors", "config.json"], "", "no tokenizer.json"),
        (
            ["adapter_model.safetensors", "adapter_config.json"],
            "",
            "the repository is an adapter; fetch it into a folder",
        ),
    ],
)
def test_a_repository_that_lacks_what_is_asked_for(rig: HubRig, files: list[str], asked: str, reason: str) -> None:
    rig.state.add(NAME, {file: b"x" for file in files})
    assert reason in rig.refusal(NAME + asked)
    assert rig.state.taken == []


def test_no_network(rig: HubRig) -> None:
    with socket.socket() as closed:  # bound and not listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        rig.hub = replace(rig.hub, endpoint=endpoint)
        message = rig.refusal()
    assert f"can't reach {endpoint} (" in message and f"in the cache {rig.hub.cache}" in message


def test_a_hub_that_is_down_or_has_had_enough(rig: HubRig) -> None:
    rig.state.status = 503
    assert "(it answers 503)" in rig.refusal()
    rig.state.status = 429
    assert "too many requests" in rig.refusal()
    rig.state.status = 418
    assert "answers 418" in rig.refusal()


def test_offline_and_not_in_the_cache(rig: HubRig) -> None:
    assert "offline, and the cache" in rig.refusal(offline=True)
    assert rig.state.asked == []


def test_offline_by_the_variable_of_the_library(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hub_of_environment(False).offline
    assert hub_of_environment(True).offline
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub_of_environment(False).offline


def test_an_endpoint_that_is_no_url(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "")
    with pytest.raises(ConfigError, match="^HF_ENDPOINT is ''; write a URL"):
        hub_of_environment(False)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_meanwhile(rig: HubRig, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    rig.state.add(NAME, SMALL)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(number, "full")

    monkeypatch.setattr(file_download, "http_get", full)
    assert f"the disk of {rig.hub.cache} is full" in rig.refusal()


def test_a_cache_that_is_no_folder(rig: HubRig) -> None:
    rig.state.add(NAME, SMALL)
    rig.hub.cache.parent.mkdir()
    rig.hub.cache.touch()
    said = rig.refusal()
    assert (
        "Not a directory" in said or "File exists" in said
    ) and "; set HF_HOME to a folder that can be written" in said


def test_a_tiktoken_file_stands_for_a_tokenizer() -> None:
    """Kimi's repositories have no other, and NVIDIA's a second file that says how the weights are stored."""
    files = ["config.json", "hf_quant_config.json", "model.safetensors", "tiktoken.model"]
    check_listing(HubName(NAME), dict.fromkeys(files, 1))
    assert {"tiktoken.model", "hf_quant_config.json"} <= {*matching(TEXT, files)}


def test_a_tiktoken_file_of_an_unknown_type_is_refused_unfetched(rig: HubRig) -> None:
    files = {"config.json": b'{"model_type": "unheard"}', "model.safetensors": b"{}", "tiktoken.model": b""}
    rig.state.add(NAME, files)
    assert "how unheard cuts words is told only by its own code" in rig.refusal()
    assert not any(seen.path == "model.safetensors" for seen in rig.state.taken)
