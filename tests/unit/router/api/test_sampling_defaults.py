"""Where the sampling values of requests without them come from, and which of them a request replaces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.anthropic.messages import MESSAGES, Messages
from router.api.ask.resolve import Resolver
from router.api.ask.sampling_defaults import NAMES, load_sampling_defaults
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT, Chat
from router.api.openai.completions import COMPLETIONS, Completions
from router.api.openai.responses import RESPONSES, Responses, echo_of
from router.text.hashlm import hash_text_model
from shared.config.models import shipped_model
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import ConfigError
from shared.core.sampling_params import NEUTRAL, SamplingValues
from tests.support.models import tiny_gguf

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
OWN = SamplingValues(0.7, 0.8, 20, 0.02, 1.05)
USER = [{"role": "user", "content": "hi"}]
APIS: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
    (Chat(), CHAT, {"messages": USER}),
    (Completions(), COMPLETIONS, {"prompt": "hi"}),
    (Messages(), MESSAGES, {"messages": USER, "max_tokens": 5}),
    (Responses(), RESPONSES, {"input": "hi"}),
)


def folder_with(path: Path, generation: dict[str, Any] | None) -> str:
    (path / "config.json").write_text("{}")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return str(path)


def test_a_folder_s_values_are_those_of_generation_config_json(tmp_path: Path) -> None:
    other = {"do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 2048, "min_p": None, "typical_p": None}
    found = load_sampling_defaults("model", folder_with(tmp_path, QWEN | other))
    assert found.values == SamplingValues(0.7, 0.8, 20, 0.0, 1.05)
    assert found.unused == ("do_sample", "max_new_tokens")
    assert found.source == str(tmp_path / "generation_config.json")


def test_a_model_without_values_is_neutral(tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "m.gguf", {})
    for model in ("hashlm", "scripted", folder_with(tmp_path, None), str(file)):
        assert load_sampling_defaults("model", model).values == NEUTRAL


def write_gguf(path: Path) -> Path:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_float32("general.sampling.top_p", 0.8)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.min_p", 0.02)
        writer.add_float32("general.sampling.penalty_repeat", 1.05)
        writer.add_int32("general.sampling.penalty_last_n", 64)

    return tiny_gguf.write(path, {}, more=add)


def test_a_gguf_file_s_values_are_its_own(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    found = load_sampling_defaults("model", str(path))
    assert (found.values, found.unused, found.source) == (OWN, ("penalty_last_n",), str(path))


def test_the_shipped_model_s_values_are_in_a_table() -> None:
    assert load_sampling_defaults("model", "smollm2").values == shipped_model.SAMPLING != NEUTRAL


def test_neutral_ignores_what_the_model_says(tmp_path: Path) -> None:
    assert load_sampling_defaults("neutral", folder_with(tmp_path, QWEN)).values == NEUTRAL


def test_a_file_replaces_what_the_model_says(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"top_k": 5, "seed": 1}')
    found = load_sampling_defaults(str(own), folder_with(tmp_path, QWEN))
    assert (found.values, found.unused) == (SamplingValues(top_k=5), ("seed",))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", float("nan")),
        ("top_p", -0.1),
        ("top_k", 1.5),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("repetition_penalty", True),
    ],
)
def test_an_impossible_value_is_refused_by_name(tmp_path: Path, name: str, value: object) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({name: value}))
    with pytest.raises(ConfigError, match=rf"own\.json.*{name}.*--sampling-defaults"):
        load_sampling_defaults(str(own), "hashlm")


@pytest.mark.parametrize("text", ["[]", "no json"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    own = tmp_path / "own.json"
    own.write_text(text)
    with pytest.raises(ConfigError, match="own.json is not"):
        load_sampling_defaults(str(own), "hashlm")


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="--sampling-defaults newtral: there is no such file"):
        load_sampling_defaults("newtral", "hashlm")


def planned(api: Any, table: Any, body: dict[str, Any]) -> GenerationPlan:
    resolver = Resolver("hashlm", hash_text_model(), LimitsConfig(), defaults=OWN)
    return api.plan(BodyParser(table).parse(json.dumps(body).encode()).body, resolver, Contexts(1000, 1000))


@pytest.mark.parametrize(("api", "table", "base"), APIS)
@pytest.mark.parametrize("given", [lambda name: {}, lambda name: {name: None}], ids=["absent", "null"])
def test_a_field_that_is_null_or_absent_has_the_default(
    api: Any, table: Any, base: dict[str, Any], given: Callable[[str], dict[str, Any]]
) -> None:
    own = [name for name in NAMES if name in table.served.__struct_fields__]
    body = base | {key: value for name in own for key, value in given(name).items()}
    assert planned(api, table, body).sampling.values == OWN


@pytest.mark.parametrize(("api", "table", "base"), APIS)
def test_a_request_s_own_value_wins(api: Any, table: Any, base: dict[str, Any]) -> None:
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    for name, value in neutral.items():
        if name in table.served.__struct_fields__:
            values = planned(api, table, base | {name: value}).sampling.values
            wanted = {name: max(0, value)}
            assert values == SamplingValues(**{key: wanted.get(key, getattr(OWN, key)) for key in NAMES})


def test_a_default_top_k_has_the_vocabulary_as_its_limit() -> None:
    resolver = Resolver("hashlm", hash_text_model(), LimitsConfig(), defaults=SamplingValues(top_k=10**9))
    body = BodyParser(COMPLETIONS).parse(b'{"prompt": "hi"}').body
    assert Completions().plan(body, resolver, Contexts(1000, 1000)).sampling.top_k == 96


def test_responses_shows_the_values_that_were_used() -> None:
    body = BodyParser(RESPONSES).parse(b'{"input": "hi", "top_p": 0.5}').body
    sampling = planned(Responses(), RESPONSES, {"input": "hi", "top_p": 0.5}).sampling
    shown = echo_of(body, sampling)
    assert (shown["temperature"], shown["top_p"]) == (0.7, 0.5)
