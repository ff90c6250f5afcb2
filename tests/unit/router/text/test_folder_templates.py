"""Which templates and tokens a model folder or a GGUF file has, compared with what transformers finds there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, models, pre_tokenizers

from router.text import gguf_tokenizer
from router.text.chat.conversation import Conversation
from router.text.chat.interface import TextModel
from router.text.folder_tokenizer import load_folder
from shared.config.settings.text_settings import TextConfig
from shared.core.errors import ConfigError
from tests.support.bodies.rendered import chat_text

NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token", "audio_token", "flag_token")
SHOWS_TOKENS = "".join(f"{name}={{{{ {name} | default('none') }}}} " for name in NAMES)
USER = {"role": "user", "content": "x"}
OBJECT = {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def write_folder(folder: Path, own: dict[str, Any]) -> Path:
    inner = tokenizers.Tokenizer(models.BPE(vocab={"<": 0, "s": 1, ">": 2, "/": 3}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>", "<i>")])
    inner.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast"} | own
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "config.json").write_text('{"max_position_embeddings": 64, "model_type": "llama"}')
    return folder


def theirs(folder: Path, **more: Any) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    return str(tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **more))


def ours(folder: Path, **more: Any) -> str:
    return chat_text(load_folder(folder, TextConfig()), Conversation([USER], **more))


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", **OBJECT}, "pad_token": None},
        {"bos_token": "<s>", "image_token": "<i>", "flag_token": True, "add_bos_token": True},
        {"extra_special_tokens": {"image_token": "<i>"}, "eos_token": "</s>"},
        {"extra_special_tokens": ["<i>"], "unk_token": "<s>"},
        {"additional_special_tokens": ["<i>"], "added_tokens_decoder": {}, "bos_token": "<s>"},
    ],
)
@pytest.mark.parametrize("older", [None, {"bos_token": OBJECT, "pad_token": "<s>"}])
def test_tokens_are_those_of_transformers(tmp_path: Path, own: dict[str, Any], older: dict[str, Any] | None) -> None:
    folder = write_folder(tmp_path, own | {"chat_template": SHOWS_TOKENS})
    if older is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(older))
    assert ours(folder) == theirs(folder)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"chat_template.jinja": "file"},
        {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "file with tools"},
    ],
)
@pytest.mark.parametrize(
    "described", ["one", [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "listed, tools"}]]
)
def test_templates_are_those_of_transformers(tmp_path: Path, files: dict[str, str], described: object) -> None:
    folder = write_folder(tmp_path, {"chat_template": described})
    (folder / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ours(folder) == theirs(folder)
    assert ours(folder, tools=tools) == theirs(folder, tools=tools)


def test_missing_default_and_unreadable_templates_are_errors(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]})
    with pytest.raises(ConfigError, match="none is called 'default'"):
        load_folder(folder, TextConfig())
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja"):
        load_folder(folder, TextConfig())


def gguf_model(monkeypatch: pytest.MonkeyPatch, options: TextConfig, **more: Any) -> TextModel:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<pad>", "x"],
        "tokenizer.ggml.token_type": [3, 3, 3, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 1,
        "llama.context_length": 128,
        **more,
    }
    monkeypatch.setattr(gguf_tokenizer, "read_metadata", lambda path: metadata)
    return gguf_tokenizer.load_gguf(Path("made-up.gguf"), options)


def test_named_templates_and_tokens_of_a_gguf_file(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {
        "tokenizer.chat_template": SHOWS_TOKENS,
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.ggml.padding_token_id": 2,
    }
    model = gguf_model(monkeypatch, TextConfig(), **more)
    shown = chat_text(model, Conversation([USER]))
    assert shown.startswith("bos_token=none eos_token=</s> unk_token=none pad_token=<pad> ")
    assert chat_text(model, Conversation([USER], tools=[])) == "with tools"


def test_the_server_s_kwargs_reach_the_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = TextConfig(chat_template_kwargs='{"enable_thinking": false}')
    source = "{{ enable_thinking | default('unset') }}"
    for given, shown in ((options, "False"), (TextConfig(), "unset")):
        model = gguf_model(monkeypatch, given, **{"tokenizer.chat_template": source})
        assert chat_text(model, Conversation([USER])) == shown
        folder = write_folder(tmp_path, {"chat_template": source})
        assert chat_text(load_folder(folder, given), Conversation([USER])) == shown


@pytest.mark.parametrize("given", ["{", "[1]", '{"a": [1]}', '{"a": {}}', "5"])
def test_kwargs_that_are_no_object_of_scalars_end_the_start(given: str) -> None:
    with pytest.raises(ConfigError, match="--chat-template-kwargs"):
        TextConfig(chat_template_kwargs=given)
