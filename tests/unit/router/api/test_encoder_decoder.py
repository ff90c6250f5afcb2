"""What router and nodes make of the folder of a model with an encoder, before any request runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.ask.resolve import Resolver
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT, Chat
from router.api.openai.choices_writer import ChoicesWriter
from router.api.openai.completions import COMPLETIONS, Completions, CompletionShape
from router.api.openai.tokenization import TokenizeRequest, ids_of
from router.api.site.generation import Asker, Generation
from router.requests.new_request import NewRequest
from router.text.chat.interface import TextModel, decode_ids
from router.text.detokenizer import Detokenizer
from router.text.folder_tokenizer import load_folder
from shared.config.settings.settings import LimitsConfig, SpecConfig
from shared.config.settings.text_settings import TextConfig
from shared.core.errors import ConfigError, InvalidRequest
from shared.device.gpu import MemoryInfo
from shared.kernel.team.team import Team
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.loading.pipeline import load_pipeline
from shared.model.loading.shard import load_shard
from shared.model.math.kernels import Formats
from shared.speculation.drafters import make_drafter
from tests.support.models.tiny_models import Rows
from tests.support.models.tiny_t5 import EOS, PAD, VOCAB, text_of, write_tiny_t5

CONTEXT = 50
PROMPT = "the quick baton runs to the sea"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5")
    write_tiny_t5(path)
    return path


@pytest.fixture(scope="module")
def text(folder: Path) -> TextModel:
    return load_folder(folder, TextConfig())


def plan(text: TextModel, *, is_strict: bool = False, **fields: object) -> GenerationPlan:
    body = BodyParser(COMPLETIONS).parse(json.dumps({"model": "t5", **fields}).encode()).body
    return Completions().plan(
        body, Resolver("t5", text, LimitsConfig(), is_strict=is_strict), Contexts(CONTEXT, CONTEXT)
    )


def sent(text: TextModel, plan: GenerationPlan) -> list[NewRequest]:
    """What a node will get."""
    shape = CompletionShape(text.tokenizer, plan.show)
    generation = Generation(plan, lambda facts: ChoicesWriter(shape, facts), text.tokenizer, None, None, 0.0)
    return [generation._new_request(job, Asker()) for job in range(len(plan.jobs))]


# ---- text


def test_prompts_end_with_the_encoder_end_and_the_decoder_start(text: TextModel) -> None:
    made = plan(text, prompt=[PROMPT, "moon"])
    assert [job.ids[-1] for job in made.jobs] == [EOS, EOS]
    assert [request.prompt_ids for request in sent(text, made)] == [[*job.ids, PAD] for job in made.jobs]
    (request,) = sent(text, plan(text, prompt=[5, 6, 7]))
    assert request.prompt_ids == [5, 6, 7, PAD], "ids are taken as they are"


def test_the_start_token_is_its_config_s(tmp_path: Path) -> None:
    """generation_config.json says it, else config.json, else it is the padding."""
    write_tiny_t5(tmp_path, decoder_start_token_id=9)
    assert load_folder(tmp_path, TextConfig()).tokenizer.facts.start_ids == (9,)
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    raw = json.loads(config.read_text())
    generation.write_text(json.dumps({"decoder_start_token_id": 8}))
    assert load_folder(tmp_path, TextConfig()).tokenizer.facts.start_ids == (8,)
    generation.unlink()
    assert load_folder(tmp_path, TextConfig()).tokenizer.facts.start_ids == (9,)
    config.write_text(json.dumps(raw | {"decoder_start_token_id": None, "pad_token_id": 3}))
    assert load_folder(tmp_path, TextConfig()).tokenizer.facts.start_ids == (3,)
    config.write_text(json.dumps(raw | {"decoder_start_token_id": None, "pad_token_id": None}))
    for load in (lambda folder: load_folder(folder, TextConfig()), lambda folder: load_model(str(folder))):
        with pytest.raises(ConfigError, match="decoder_start_token_id is None"):
            load(tmp_path)


def test_a_context_holds_the_start_token_too(text: TextModel) -> None:
    """An input of 20, the start token and 29 of answer."""
    prompt = list(range(5, 25))
    assert plan(text, prompt=prompt, max_tokens=29).sampling.max_tokens == 29
    assert plan(text, prompt=prompt, max_tokens=30).sampling.max_tokens == 29
    with pytest.raises(InvalidRequest, match="only 29 tokens fit"):
        plan(text, is_strict=True, prompt=prompt, max_tokens=30)
    assert plan(text, prompt=[5] * (CONTEXT - 2)).sampling.max_tokens == 1
    with pytest.raises(InvalidRequest, match=r"49 tokens; at most 48 fit"):
        plan(text, prompt=[5] * (CONTEXT - 1))


def test_a_request_s_priority_reaches_the_queue(text: TextModel) -> None:
    plans = plan(text, prompt="x"), plan(text, prompt="x", priority=-2)
    assert [new.rank for made in plans for new in sent(text, made)] == [0, -2]


def test_empty_text_is_one_token_and_an_empty_id_list_is_refused(text: TextModel) -> None:
    assert plan(text, prompt="").jobs[0].ids == [EOS]
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        plan(text, prompt=[[]])


def test_echo_is_what_the_client_sent(text: TextModel) -> None:
    assert plan(text, prompt=PROMPT, echo=True).jobs[0].echo == PROMPT
    ids = text.tokenizer.encode(PROMPT, add_special=True)
    assert plan(text, prompt=ids, echo=True).jobs[0].echo == PROMPT


def test_tokens_of_a_text_are_those_without_the_start(text: TextModel) -> None:
    ids = ids_of(TokenizeRequest(prompt="moon"), Resolver("t5", text, LimitsConfig()), {})
    assert ids[-1] == EOS and PAD not in ids


def test_chat_is_refused_by_name(text: TextModel) -> None:
    body = BodyParser(CHAT).parse(b'{"model": "t5", "messages": [{"role": "user", "content": "hi"}]}').body
    with pytest.raises(InvalidRequest, match="no chat template: ask /v1/completions"):
        Chat().plan(body, Resolver("t5", text, LimitsConfig()), Contexts(CONTEXT, CONTEXT))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 4), max_size=12))
def test_answers_read_as_transformers_writes_them(folder: Path, text: TextModel, ids: list[int]) -> None:
    """The space that a first piece has is none: nothing is in front of it."""
    shown = Detokenizer(text.tokenizer)
    streamed = "".join(map(shown.feed, ids))
    assert streamed == decode_ids(text.tokenizer, ids) == text_of(folder, ids)


def test_a_first_piece_s_space_is_not_shown(text: TextModel) -> None:
    ids = text.tokenizer.encode("the moon", add_special=True)
    shown = Detokenizer(text.tokenizer)
    assert "".join(map(shown.feed, [PAD, *ids])) == "the moon"


# ---- weights


def test_a_folder_is_loaded_by_its_name_in_both_dtypes(folder: Path) -> None:
    """float32's logits are transformers' (simulation/test_encoder.py); bfloat16's are near them."""
    found = [load_model(str(folder), LoadOptions(dtype)) for dtype in ("float32", "bfloat16")]
    assert [model.spec.dtype for model in found] == ["float32", "bfloat16"]
    assert load_model(str(folder), LoadOptions("auto")).spec.dtype == "bfloat16"
    assert [model.kv_planes(4)[0].dtype for model in found] == [torch.float32, torch.bfloat16]
    assert all(model.spec.has_encoder and model.spec.max_context == 1024 for model in found)
    assert load_model(str(folder), LoadOptions(max_context=4000)).spec.max_context == 4000
    prompt = [*range(5, 25), EOS, PAD]
    exact, near = (seq2seq_logits(model, prompt) for model in found)
    assert near.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(exact, near, dim=0) > 0.99


def seq2seq_logits(model: object, prompt: list[int]) -> torch.Tensor:
    """Of the first token of the answer."""
    rows = Rows(model, 1, 4)
    return rows.step({0: prompt}, [len(prompt) - 1], encoder_lens=[len(prompt) - 1])[0]


@pytest.mark.parametrize(
    ("wanted", "device", "message"),
    [
        ({"adapters": {"a": "/nowhere"}}, "cpu", "--lora"),
        ({"formats": Formats(kv="int8")}, "cpu", "--kv-dtype"),
        ({"formats": Formats(weights="fp8")}, "cpu", "--weight-dtype"),
        ({}, "cuda", "--device cuda"),
        ({"dtype": "float64"}, "cpu", "--dtype"),
        ({"memory": MemoryInfo(1000, 1000)}, "cpu", "the weights need"),
    ],
)
def test_what_it_can_t_do_is_refused_by_name(folder: Path, wanted: dict[str, Any], device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(str(folder), replace(LoadOptions("float32"), **wanted), device)


def test_ranks_stages_and_draft_heads_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--tp"):
        load_shard(str(folder), LoadOptions("float32"), None)
    with pytest.raises(ConfigError, match="--pp 2: models with an encoder"):
        load_pipeline(str(folder), LoadOptions("float32"), 2)
    model = load_model(str(folder), LoadOptions("float32"))
    for spec in ("eagle", "mtp"):
        with pytest.raises(ConfigError, match=f"--spec {spec}"):
            make_drafter(SpecConfig(spec=spec), str(folder), model, Team())
