"""Models by name: what is fetched from a hub, what is not, and that it loads. The hub is a small server on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.hub.files import INDEX, matching
from deploy.hub.name import HubName, parse_hub_name
from router.text.load import load_text_model
from shared.core.errors import ConfigError
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.node.assembly.fingerprint import difference, make_fingerprint
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models import tiny_gguf
from tests.support.web.hub_rig import NAME, WEIGHTS, HubRig, hub_rig, tiny_repo
from tests.support.web.hub_server import Seen

ROOT = Path(__file__).parents[4]
FETCH_ELSEWHERE = """
import pathlib, sys
from deploy.hub.fetch import fetch
from deploy.hub.hub import Hub
from deploy.hub.name import HubName
fetch(HubName(sys.argv[1]), Hub(sys.argv[2], pathlib.Path(sys.argv[3])), print, with_weights=True)
"""
PLAIN = LoadOptions("float32", kernels="torch")
SERVED = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", WEIGHTS}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return tiny_repo(tmp_path_factory.mktemp("repo") / "tiny")


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRig]:
    with hub_rig(tmp_path, monkeypatch) as made:
        yield made


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name:q4.gguf", HubName("org/name", file="q4.gguf")),
        ("Org-1/na.me_2@main:sub/q4.gguf", HubName("Org-1/na.me_2", "main", "sub/q4.gguf")),
        *[(text, None) for text in ("smollm2", "hashlm", "./org/name", "/org/name", "~/name", "a/b/c", "a/b.gguf")],
        *[(text, None) for text in ("org/name:q4.bin", "org/name@", "org/name:../x.gguf", "org/", "org\\name", "")],
    ],
)
def test_what_is_a_name_on_the_hub(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name
    assert name is None or str(name) == text


def test_a_local_path_of_that_spelling_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse_hub_name("org/name") is None
    assert parse_hub_name("org/other") is not None


def test_a_model_is_fetched_and_loads_as_the_local_folder_does(
    rig: HubRig, files: dict[str, bytes], tmp_path: Path
) -> None:
    rig.state.add(NAME, files)
    folder = rig.fetch()
    assert rig.cached() == SERVED
    assert {seen.path for seen in rig.state.taken} == SERVED
    local = tmp_path / "local"
    local.mkdir()
    for name in SERVED:
        (local / name).write_bytes(files[name])
    fetched, original = load_model(str(folder), PLAIN), load_model(str(local), PLAIN)
    assert fetched.spec.weights_hash == original.spec.weights_hash
    assert fetched.spec.name == NAME
    text = load_text_model(str(folder))
    assert text.tokenizer.encode("Hi there", add_special=True) == load_text_model(str(local)).tokenizer.encode(
        "Hi there", add_special=True
    )


def test_nothing_is_fetched_twice_and_offline_sends_no_request(rig: HubRig, files: dict[str, bytes]) -> None:
    rig.state.add(NAME, files)
    folder = rig.fetch()
    rig.state.taken.clear()
    assert rig.fetch() == folder
    assert rig.state.taken == []
    rig.state.asked.clear()
    assert rig.fetch(offline=True) == folder
    assert rig.state.asked == []


def test_a_router_fetches_no_weights_and_a_node_adds_them(rig: HubRig, files: dict[str, bytes]) -> None:
    rig.state.add(NAME, files)
    folder = rig.fetch(with_weights=False)
    assert rig.cached() == SERVED - {WEIGHTS}
    load_text_model(str(folder))
    assert "lacks it or a part of it" in rig.refusal(offline=True)
    rig.state.taken.clear()
    rig.fetch()
    assert rig.state.taken == [Seen(WEIGHTS, "")]


def test_a_gguf_file_by_its_name_is_all_that_is_fetched(rig: HubRig, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "made.gguf", {})
    rig.state.add(NAME, {"q/tiny.gguf": path.read_bytes(), "big.gguf": b"GGUF of others", "README.md": b"x"})
    fetched = rig.fetch(f"{NAME}:q/tiny.gguf")
    assert rig.state.taken_paths() == ["q/tiny.gguf"]
    assert load_model(str(fetched), PLAIN).spec.weights_hash == load_model(str(path), PLAIN).spec.weights_hash
    assert rig.fetch(f"{NAME}:q/tiny.gguf", offline=True) == fetched


def test_all_parts_of_a_gguf_are_fetched_by_the_name_of_one(rig: HubRig) -> None:
    parts = [f"q/big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    rig.state.add(NAME, {name: name.encode() for name in (*parts, "q/big-00001-of-00002.gguf")})
    for part in (parts[0], parts[2]):
        assert rig.fetch(f"{NAME}:{part}") == rig.fetch(f"{NAME}:{parts[0]}", offline=True)
    assert rig.state.taken_paths() == parts


def test_the_index_decides_which_of_duplicate_weights_is_fetched(rig: HubRig, files: dict[str, bytes]) -> None:
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    more = {INDEX: json.dumps(index).encode(), "model-00001-of-00001.safetensors": files[WEIGHTS]}
    rig.state.add(NAME, files | more | {"consolidated.safetensors": b"twice"})
    rig.fetch()
    assert rig.cached() == SERVED - {WEIGHTS} | set(more)


@pytest.mark.parametrize("shard", ["../../../model.safetensors", "other.safetensors", "modeling_tiny.py", 3])
def test_an_index_that_names_no_weight_file_is_refused(rig: HubRig, files: dict[str, bytes], shard: object) -> None:
    rig.state.add(NAME, files | {INDEX: json.dumps({"weight_map": {"a": shard}}).encode()})
    assert INDEX in rig.refusal()
    assert WEIGHTS not in rig.cached()


def test_names_that_lead_out_of_the_folder_match_nothing() -> None:
    names = ["a.safetensors", "../b.safetensors", "sub/c.safetensors", "..safetensors", "/d.safetensors"]
    assert matching(("*.safetensors",), names) == ["a.safetensors"]


def test_two_revisions_of_a_name_differ_by_their_fingerprints(rig: HubRig, files: dict[str, bytes]) -> None:
    repo = rig.state.add(NAME, files)
    repo.push(files | {WEIGHTS: changed_last_byte(files[WEIGHTS])}, "other-weights")
    repo.push(files | {"generation_config.json": b'{"eos_token_id": [1, 2]}'}, "other-ends")
    repo.push(files | {"README.md": b"a word more"}, "other-words")
    prints = {}
    for revision in ("main", "other-weights", "other-ends", "other-words"):
        model = load_model(str(rig.fetch(f"{NAME}@{revision}")), PLAIN)
        prints[revision] = make_fingerprint(model.spec, (), 16, None, "test")
    assert difference(prints["main"], prints["other-weights"]).startswith("weights differs")
    assert difference(prints["main"], prints["other-ends"]).startswith("weights differs")
    assert difference(prints["main"], prints["other-words"]) == ""


def changed_last_byte(data: bytes) -> bytes:
    return data[:-2] + bytes([data[-2] ^ 1, data[-1]])


def test_a_branch_that_moved_is_fetched_anew_and_a_commit_stays(rig: HubRig, files: dict[str, bytes]) -> None:
    repo = rig.state.add(NAME, files)
    first, commit = rig.fetch(), repo.branches["main"]
    repo.push(files | {"chat_template.jinja": b"new"})
    assert (rig.fetch() / "chat_template.jinja").read_bytes() == b"new"
    assert rig.fetch(f"{NAME}@{commit}") == first
    assert rig.state.taken_paths().count(WEIGHTS) == 1  # the same bytes are in the cache


def test_a_download_that_broke_off_keeps_whole_files(rig: HubRig, files: dict[str, bytes]) -> None:
    rig.state.add(NAME, files)
    rig.state.failing[WEIGHTS] = 500
    assert "it answers 500" in rig.refusal()
    assert WEIGHTS not in rig.cached()
    rig.state.failing.clear()
    rig.state.taken.clear()
    rig.fetch()
    assert rig.state.taken_paths()[-1] == WEIGHTS
    assert not {"config.json", "generation_config.json"} & set(rig.state.taken_paths())


def test_a_truncated_file_is_never_taken_for_the_whole(rig: HubRig, files: dict[str, bytes]) -> None:
    rig.state.add(NAME, files)
    rig.state.shortened[WEIGHTS] = 1000
    assert "the download failed" in rig.refusal()
    assert WEIGHTS not in rig.cached()


def test_while_the_hub_is_down_the_cache_serves(rig: HubRig, files: dict[str, bytes]) -> None:
    rig.state.add(NAME, files)
    folder = rig.fetch()
    rig.state.status = 503
    rig.said.clear()
    assert rig.fetch() == folder
    assert rig.said == [f"can't reach {rig.hub.endpoint} (it answers 503): using {NAME} from the cache"]


def test_of_two_processes_at_once_one_fetches_a_file(rig: HubRig, files: dict[str, bytes]) -> None:
    rig.state.add(NAME, files)
    rig.state.held[WEIGHTS] = 2  # nobody gets it before both want it
    command = [sys.executable, "-c", FETCH_ELSEWHERE, NAME, rig.hub.endpoint, str(rig.hub.cache)]
    others = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [other.wait(HANG_GUARD_S) for other in others] == [0, 0]
    assert rig.state.taken_paths().count(WEIGHTS) == 1


def test_no_room_is_said_before_the_weights_are_asked_for(rig: HubRig, files: dict[str, bytes]) -> None:
    rig.state.add(NAME, files)
    rig.hub = replace(rig.hub, free_bytes=lambda folder: 10_000)
    message = rig.refusal()
    assert "GB are free" in message and str(rig.hub.cache) in message and "HF_HOME" in message
    assert WEIGHTS not in rig.state.taken_paths()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "mamba keeps a state beside keys and values"),
        ({"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}, "can't read its config.json"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: quant_method 'hqq' is not supported"),
        (
            {
                "architectures": ["OlmoForCausalLM"],
                "model_type": "olmo",
                "quantization_config": {"quant_method": "hqq"},
            },
            "quantization_config: quant_method 'hqq' is not supported",
        ),
        ({"hidden_size": "x"}, "config.json: missing or wrong field"),
    ],
)
def test_what_is_not_served_is_refused_by_its_config_alone(
    rig: HubRig, files: dict[str, bytes], change: dict[str, object], reason: str
) -> None:
    config = json.loads(files["config.json"]) | change
    rig.state.add(NAME, files | {"config.json": json.dumps(config).encode()})
    message = rig.refusal()
    assert reason in message and str(rig.hub.cache) not in message
    assert set(rig.state.taken_paths()) == {"config.json", "generation_config.json"}


def test_an_unsupported_gguf_is_refused_by_the_hub_s_word_alone(rig: HubRig) -> None:
    rig.state.add(NAME, {"q.gguf": b"GGUF"}, gguf="mamba")
    assert "GGUF architecture 'mamba' is not supported" in rig.refusal(f"{NAME}:q.gguf")
    assert rig.state.taken == []


def test_errors_are_typed(rig: HubRig) -> None:
    with pytest.raises(ConfigError):
        rig.fetch()
