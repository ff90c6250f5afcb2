"""A random model, bound by the grammar of each published format, calls tools through a cluster: whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from router.tools.calls.formats import BY_NAME
from router.tools.calls.python_calls import PythonCalls
from tests.support.bodies.tool_formats import WRITTEN
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.models.tiny_models import save_random

NOT_LONG = ("glm", "gemma4", "harmony")
SPECIAL = sorted({mark for written in WRITTEN.values() for mark in written.special})
END = "<end>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"], "description": "a town"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9, "description": "how many"},
        "hourly": {"type": "boolean", "description": "whether for each hour"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WITHOUT_RANGES: dict[str, Any] = {**SCHEMA, "properties": {**SCHEMA["properties"], "days": {"type": "integer"}}}
WEATHER = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}
PLAIN = {"type": "function", "function": WEATHER}
STRICT = {"type": "function", "function": WEATHER | {"strict": True}}
# reads tools, and shows no format: --tool-format names it
TEMPLATE = "{{ tools }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose vocabulary is bytes and every format's special tokens."""
    place = tmp_path_factory.mktemp("formats")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END, *SPECIAL])
    config = transformers.LlamaConfig(
        vocab_size=len(letters) + 1 + len(SPECIAL),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=inner.token_to_id(END),
    )
    save_random(transformers.LlamaForCausalLM(config), place)
    inner.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (place / "chat_template.jinja").write_text(TEMPLATE)
    return place


@pytest.fixture(params=[pytest.param(n, marks=() if n in NOT_LONG else pytest.mark.long) for n in BY_NAME])
def site(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[tuple[str, Cluster]]:
    flags = ("--model", str(folder), "--served-model-name", "tiny", "--max-context", "4096", "--dtype", "float32")
    with baton_up(tmp_path / "log", *flags, "--tool-format", request.param) as cluster:
        yield request.param, cluster


def test_a_call_of_each_format_arrives(site: tuple[str, Cluster]) -> None:
    name, cluster = site
    schema = WITHOUT_RANGES if isinstance(BY_NAME[name].shape, PythonCalls) else SCHEMA
    special = tokenizers.Tokenizer.from_file(str(folder_of(cluster) / "tokenizer.json"))
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}, "auto"):
            for tool in (PLAIN, STRICT):
                more: dict[str, Any] = {"tools": [tool], "tool_choice": choice, "seed": 5, "max_tokens": 1000}
                more["parallel_tool_calls"] = False  # a random model would call for ever
                if choice == "auto":
                    more["logit_bias"] = begins(name, special)
                # a random model may think for ever where it may think first
                must_call = choice != "auto" or more["logit_bias"]
                seeds = (more | {"seed": seed} for seed in range(5, 15 if must_call else 6))
                more, calls = next(((one, calls) for one in seeds if (calls := whole(client, one))), (more, []))
                assert calls == streamed(client, more)
                assert calls or not must_call, (name, choice)
                for called, arguments in calls:
                    assert called == "get_weather"
                    jsonschema.validate(json.loads(arguments), schema)


def folder_of(cluster: Cluster) -> Path:
    flags = [str(flag) for flag in cluster.process.args]  # type: ignore[union-attr]
    return Path(flags[flags.index("--model") + 1])


def begins(name: str, tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Return biases to the special tokens that begin a call, so that a random model calls where it need not."""
    marks = [mark for mark in WRITTEN[name].special if WRITTEN[name].stop.startswith(mark)]
    return {str(tokenizer.token_to_id(mark)): 100 for mark in marks[:1]}


def ask(client: openai.OpenAI, more: dict[str, Any]) -> Any:
    messages: Any = [{"role": "user", "content": "What is the weather?"}]
    return client.chat.completions.create(model="tiny", messages=messages, **more)


def whole(client: openai.OpenAI, more: dict[str, Any]) -> list[tuple[str, str]]:
    (choice,) = ask(client, more).choices
    assert choice.finish_reason != "length" or choice.message.tool_calls is None
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]


def streamed(client: openai.OpenAI, more: dict[str, Any]) -> list[tuple[str, str]]:
    calls: dict[int, list[str]] = {}
    for chunk in ask(client, more | {"stream": True}):
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, ["", ""])
                call[0] += part.function.name or ""
                call[1] += part.function.arguments or ""
    return [(name, arguments) for name, arguments in calls.values()]
