"""`baton prove --layers`: a replay that differs nowhere says so; a damaged page is blamed on the layer it lies in.
Before that, `baton prove` checks a library's model."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers

from deploy import cli
from deploy.tools.prove import client as prove_client
from deploy.tools.prove import command, layers
from deploy.tools.prove.layers import PLAIN, LayerRow, ReplayMode, mode_of, name_layer, replay
from shared.core.errors import ConfigError
from shared.model.formats.opened import LoadOptions
from shared.model.llama.llama import LlamaModel
from shared.model.loading.load import load_model
from tests.support.models.library_families import save
from tests.support.web.serving import QuietHandler, serving

NUM_LAYERS = 3
PROMPT, ANSWER = list(range(3, 60)), [5, 9, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=96, intermediate_size=80, num_hidden_layers=NUM_LAYERS, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, head_dim=16,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "mode",
    [ReplayMode(16, 1 << 30, True), ReplayMode(16, 7, False), ReplayMode(64, 24, True), ReplayMode(4, 256, True)],
)
@pytest.mark.parametrize("answer", [ANSWER, []])
def test_where_nothing_is_wrong_no_layer_differs(folder: Path, mode: ReplayMode, answer: list[int]) -> None:
    said = name_layer(str(folder), "float32", PROMPT, answer, mode)
    assert f"no layer of {NUM_LAYERS} differs" in said


def damaging(layer: int) -> Callable[[LayerRow], None]:
    move = LayerRow.move

    def damaged(self: LayerRow) -> None:
        move(self)
        self.pool.plane("kv")[self._first + 1, layer, 1] += 0.01  # values of the second page

    return damaged


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_damaged_page_is_blamed_on_its_layer(folder: Path, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerRow, "move", damaging(layer))
    said = name_layer(str(folder), "float32", PROMPT, ANSWER, ReplayMode(16, 256, True))
    assert f"layer {layer} of {NUM_LAYERS}" in said and "is the first whose output differs, by 0.0" in said


def test_another_token_is_blamed_on_the_embedding(folder: Path) -> None:
    model = load_model(str(folder), LoadOptions("float32", kernels="separate"))
    assert isinstance(model, LlamaModel)
    wanted, got = (replay(model, PROMPT, [5, 9, last], PLAIN) for last in (4, 6))
    assert wanted.shape == (NUM_LAYERS + 1, 96)
    assert "the embedding is the first" in layers.verdict(wanted, got)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="hashlm has no layers"):
        name_layer("hashlm", "float32", PROMPT, ANSWER, PLAIN)


def test_the_mode_is_read_from_its_flags() -> None:
    assert mode_of(("--prefill", "0", "--decode", "1")) == ReplayMode(16, 256, False)
    assert mode_of(("--prefill", "1", "--page-size", "64", "--chunk-size", "24")) == ReplayMode(64, 24, True)
    assert mode_of(()).hands_over


class Forgetful(QuietHandler):
    """Answers each question anew: tokens 4, 5, 6 at first, then 4, 5, 7."""

    asked: set[str]

    def do_GET(self) -> None:
        self.say(200, b"" if self.path == "/metrics" else json.dumps({"data": [{"id": "stub"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ids = [4, 5, 7 if str(body) in self.asked else 6]
        self.asked.add(str(body))
        tops = [{"a": 0.0, "b": -1.0}] * 3
        choice = {"token_ids": ids, "prompt_token_ids": PROMPT, "logprobs": {"top_logprobs": tops}}
        choices = [choice | {"index": index} for index in range(body.get("n", 1))]
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        self.say(200, json.dumps({"choices": choices, "usage": usage}).encode())


def test_the_command_replays_the_first_difference(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prove_client, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr(command.core_plan, "apply", lambda plan: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Forgetful,), {"asked": set()}))
    with serving(server):
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert cli.main(["prove", url, url, "--layers", "--model", str(folder), "--max-tokens", "3"]) == 1
    printed = capsys.readouterr().out
    assert "answer 0, token 2: ids [7] instead of [6]" in printed and "no layer of 3 differs" in printed


def test_prove_prints_what_the_check_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("deepseek_v3", tmp_path)
    command.print_check(argparse.Namespace(model=str(tmp_path), model_library="auto", dtype="float32"))
    said = capsys.readouterr().out
    assert re.match(r"check: transformers [\d.]+ runs 4 layers with latents of 32 and 16 for 4 heads; ", said)
    assert "its logits differ by" in said and "the bound is" in said
