"""`baton models` tells what a model would do, and reads no number of its weights. The hub is a server on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load, save

from deploy import cli
from deploy.hub import hub as hubs
from deploy.hub.files import INDEX
from deploy.tools.models import look
from deploy.tools.models.look import Outlook, look_at
from shared.device.gpu import MemoryInfo
from shared.kv.layout import page_bytes, page_windows
from shared.model.formats.opened import LoadOptions
from shared.model.library.loading import load_library_model
from shared.model.loading.load import load_model
from tests.support.models import library_families
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.web.hub_rig import NAME, WEIGHTS, HubRig, hub_rig, tiny_repo, write_tokenizer
from tests.support.web.hub_server import Seen, files_of

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
AUTO = LoadOptions("auto")
PAGE = 16
STRANGE = (1 << 62).to_bytes(8, "little")  # a file that begins so has no header
HEADER = "bytes=0-100000"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRig]:
    with hub_rig(tmp_path, monkeypatch) as made:
        made.state.add(NAME, tiny_repo(tmp_path / "tiny"))
        monkeypatch.setattr(hubs, "hub_of_environment", lambda offline: replace(made.hub, offline=offline))
        monkeypatch.setattr(look, "memory_here", lambda: ("cpu", MemoryInfo(1 << 30, 1 << 31)))
        yield made


def files_in(rig: HubRig) -> dict[str, bytes]:
    repo = rig.state.repos[NAME]
    return dict(repo.files[repo.branches["main"]])


def library_repo(folder: Path, family: str) -> dict[str, bytes]:
    library_families.save(family, folder)
    write_tokenizer(folder)
    return files_of(folder)


def test_a_model_of_the_hub_is_told_by_headers_alone(rig: HubRig, tmp_path: Path) -> None:
    found = look_at(NAME)
    model = load_model(str(tmp_path / "tiny"), AUTO)
    planes = model.kv_planes(PAGE)
    assert model.spec.stored is not None
    assert found == Outlook(
        NAME,
        family="qwen2",
        program=look.COMPILED if getattr(model, "is_program", False) else look.BY_KERNELS,
        stored=model.spec.stored.format,
        weights_bytes=model.spec.stored.memory_bytes,
        kv_token_bytes=page_bytes(planes) * len(page_windows(planes)) // PAGE,
        free_bytes=1 << 30,
        context=model.spec.max_context,
        calls="hermes",
    )
    assert [seen for seen in rig.state.taken if seen.path == WEIGHTS] == [Seen(WEIGHTS, HEADER)]
    assert not {WEIGHTS, "tokenizer.json"} & rig.cached()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "deepseek_v3", "mimo_v2_flash"])
def test_a_token_takes_what_the_loaded_model_takes(rig: HubRig, tmp_path: Path, family: str) -> None:
    rig.state.add("org/other", library_repo(tmp_path / family, family))
    found = look_at("org/other")
    model = load_library_model(tmp_path / family, AUTO)
    planes = model.kv_planes(PAGE)
    assert found.refusal == "" and found.program.startswith("transformers ")
    assert found.kv_token_bytes == page_bytes(planes) * len(page_windows(planes)) // PAGE
    assert model.spec.stored is not None and found.weights_bytes == model.spec.stored.memory_bytes
    assert (found.context, found.family) == (model.spec.max_context, family)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "quantization_config": {"quant_method": "hqq"}},
        {"hidden_size": "x"},
    ],
)
def test_a_refusal_is_the_sentence_of_baton_up(rig: HubRig, change: dict[str, object]) -> None:
    repo = rig.state.repos[NAME]
    files = files_in(rig)
    config = json.loads(files["config.json"]) | change
    repo.push({**files, "config.json": json.dumps(config).encode()})
    assert look_at(NAME).refusal == rig.refusal()
    assert WEIGHTS not in rig.state.taken_paths()


def test_a_tensor_that_lacks_is_seen_in_the_headers(rig: HubRig) -> None:
    repo = rig.state.repos[NAME]
    files = files_in(rig)
    tensors = load(files[WEIGHTS])
    del tensors["model.norm.weight"]
    repo.push({**files, WEIGHTS: save(tensors)})
    refusal = look_at(NAME).refusal
    assert refusal.startswith(f"--model {NAME}: ") and "model.norm.weight" in refusal
    assert str(rig.hub.cache) not in refusal and "/tmp" not in refusal


@pytest.mark.parametrize("family", ["", "olmo2"])
def test_a_model_that_does_not_fit_is_refused_with_its_figures(
    rig: HubRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    if family:
        rig.state.add(NAME, library_repo(tmp_path / family, family))
    monkeypatch.setattr(look, "memory_here", lambda: ("cpu", MemoryInfo(1000, 2000)))
    found = look_at(NAME)
    assert found.refusal.startswith("the weights need ")
    assert found.weights_bytes > 1000 and found.kv_token_bytes and found.context


@pytest.mark.parametrize("inner", [192, 100])  # 100: columns that a product pads
def test_one_program_is_promised_where_one_is_made(rig: HubRig, tmp_path: Path, inner: int) -> None:
    folder = str(write_tiny_llama(tmp_path / "own", inner=inner, layers=1))
    write_tokenizer(tmp_path / "own")
    is_program = getattr(load_model(folder, AUTO), "is_program", False)
    assert (look_at(folder).program == look.COMPILED) == is_program


def test_what_can_not_be_asked_is_one_sentence(rig: HubRig, capsys: pytest.CaptureFixture[str]) -> None:
    assert "offline, and the cache" in look_at(NAME, offline=True).refusal
    assert "no such model" in look_at("org/none").refusal
    rig.state.failing[WEIGHTS] = 403
    assert "refuses it (403)" in look_at(NAME).refusal
    rig.state.failing.clear()
    rig.state.add(
        "org/strange", rig.state.repos[NAME].files[rig.state.repos[NAME].branches["main"]] | {WEIGHTS: STRANGE}
    )
    assert f"{WEIGHTS}: " in look_at("org/strange").refusal
    rig.fetch()
    assert look_at(NAME, offline=True) == look_at(NAME) and not look_at(NAME).refusal
    assert cli.main(["models", "no-such-folder"]) == 1
    assert "there is no such file or folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("template", "calls", "thoughts"),
    [
        ("Qwen-Qwen3-0.6B", "hermes", "<think> ... </think>"),
        ("Qwen3-Coder", "qwen3_coder", ""),
        ("Llama-3.1-json-vllm", "llama3_json", ""),
    ],
)
def test_calls_and_thoughts_are_read_without_a_tokenizer(rig: HubRig, template: str, calls: str, thoughts: str) -> None:
    repo = rig.state.repos[NAME]
    files = files_in(rig)
    del files["chat_template.jinja"]
    source = (TEMPLATES / f"{template}.jinja").read_text("utf-8")
    told = {"chat_template": source, "added_tokens_decoder": {"3": {"content": "<|im_end|>", "special": True}}}
    repo.push({**files, "tokenizer_config.json": json.dumps(told).encode()})
    found = look_at(NAME)
    assert (found.refusal, found.calls, found.thoughts) == ("", calls, thoughts)


def test_a_gguf_file_is_told_by_the_hub_s_word(rig: HubRig) -> None:
    parts = {f"q-0000{n}-of-00002.gguf": b"GGUF" * 50 for n in (1, 2)}
    rig.state.add("org/gguf", parts, gguf="qwen3")
    found = look_at("org/gguf:q-00001-of-00002.gguf")
    assert (found.family, found.stored, found.weights_bytes, found.refusal) == ("qwen3", "GGUF", 400, "")
    assert rig.state.taken == []
    rig.state.add("org/mamba", {"q.gguf": b"GGUF"}, gguf="mamba")
    assert "GGUF architecture 'mamba' is not supported" in look_at("org/mamba:q.gguf").refusal


def test_the_command_prints_lines_or_json(rig: HubRig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", NAME, "hashlm"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == NAME and "  family    qwen2" in told and told[-1] == "  run by    Baton, without files"
    library_repo(tmp_path / "other", "olmo2")
    assert cli.main(["models", str(tmp_path / "other"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["program"].startswith("transformers ") and found["family"] == "olmo2"
    assert cli.main(["models", str(tmp_path / "other"), "--json", "--model-library", "baton"]) == 1
    assert "architecture 'Olmo2ForCausalLM' is not supported" in json.loads(capsys.readouterr().out)["refusal"]


def test_without_a_name_it_lists_what_is_here(rig: HubRig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.fetch()
    assert cli.main(["models", "--json"]) == 0
    found = {row["model"]: row["bytes"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(found) == ["smollm2", NAME]
    assert found[NAME] == sum(len(files_in(rig)[name]) for name in rig.cached())
    assert cli.main(["models"]) == 0
    assert f"GiB  {NAME}" in capsys.readouterr().out


def test_the_headers_of_all_shards_are_asked_for(rig: HubRig) -> None:
    repo = rig.state.repos[NAME]
    files = files_in(rig)
    tensors = load(files.pop(WEIGHTS))
    names = sorted(tensors)
    shards = {f"model-0000{n}-of-00002.safetensors": names[n - 1 :: 2] for n in (1, 2)}
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    made = {shard: save({name: tensors[name] for name in own}) for shard, own in shards.items()}
    whole = look_at(NAME)
    repo.push({**files, **made, INDEX: json.dumps(index).encode()})
    rig.state.taken.clear()
    assert look_at(NAME) == whole
    assert {seen.path for seen in rig.state.taken if seen.range == HEADER} == set(shards)
