"""Build tokenizer and chat template from a GGUF file's metadata. Reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from router.text.chat_template import DEFAULT, JinjaTemplate
from router.text.control_tokens import guarded
from router.text.conversation import Scalar
from router.text.fast_tokenizer import FastTokenizer
from router.text.hashlm import PlainTemplate
from router.text.interface import ChatTemplate, TextModel, VocabFacts
from shared.config.gguf_metadata import read_pairs
from shared.config.text_settings import TextConfig
from shared.config.vocab_bytes import byte_level_decoder
from shared.config.vocabulary import CONTROL_TYPE, USER_DEFINED_TYPE, gguf_eos_ids, of_type
from shared.core.errors import ConfigError

TEMPLATE_KEY = "tokenizer.chat_template"  # the keys of named templates end in .NAME
TOKEN_KEYS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # GGUF's spelling
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = rf"{_LETTERS}|\p{{N}}|{_REST}"
LLAMA3_SPLIT = rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"


def read_metadata(path: Path) -> dict[str, Any]:
    return read_pairs(path, lambda name: name.startswith("tokenizer.") or name.endswith(".context_length"))


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name in ("smollm", "starcoder", "refact", "command-r"):
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if name in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("qwen2", "deepseek-r1-qwen"):
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"), byte_level])
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), byte_level])
    raise ConfigError(f"how the GGUF file splits words ({name!r}) is not known here; use the model's folder")


def build_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer. Raise ConfigError if the file has another kind of tokenizer."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(f"the GGUF file has a tokenizer of kind {kind!r}; only byte-level BPE ('gpt2') is read here")
    entries: list[str] = metadata["tokenizer.ggml.tokens"]
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    vocab = {entry: index for index, entry in enumerate(entries)}
    merges = [_split_merge(merge) for merge in metadata["tokenizer.ggml.merges"]]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in ("llama-bpe", "llama3")))
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizer(pre)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, normalized=False) for t in of_type(metadata, CONTROL_TYPE)])
    inner.add_tokens([AddedToken(t, normalized=False) for t in of_type(metadata, USER_DEFINED_TYPE)])
    return inner


def load_gguf(path: Path, options: TextConfig, edit: Callable[[str], str] = str) -> TextModel:
    """`edit` changes the default chat template."""
    metadata = read_metadata(path)
    if metadata.get(TEMPLATE_KEY):
        metadata[TEMPLATE_KEY] = edit(metadata[TEMPLATE_KEY])
    entries: list[str] = metadata["tokenizer.ggml.tokens"]
    special = of_type(metadata, CONTROL_TYPE)
    index = {entry: i for i, entry in enumerate(entries)}
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    tokenizer = FastTokenizer(
        build_tokenizer(metadata),
        entry_bytes=byte_level_decoder(),
        literal=[*special, *of_type(metadata, USER_DEFINED_TYPE)],
        facts=VocabFacts(
            vocab_size=len(entries),
            eos_ids=gguf_eos_ids(metadata),
            special_ids=frozenset(index[entry] for entry in special),
            context_length=_context_length(metadata),
        ),
        bos_id=bos_id if metadata.get("tokenizer.ggml.add_bos_token", False) else None,
    )
    tokens = _template_tokens(metadata, entries)
    return TextModel(
        tokenizer=tokenizer,
        template=_template(metadata, tokens, options.template_kwargs),
        control_tokens=guarded(options, special),
        about={**tokens, "model_max_length": tokenizer.facts.context_length},
    )


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _context_length(metadata: Mapping[str, Any]) -> int:
    lengths = [int(value) for name, value in metadata.items() if name.endswith(".context_length")]
    if not lengths:
        raise ConfigError("the GGUF file does not say its context length")
    return lengths[0]


def _template_tokens(metadata: Mapping[str, Any], entries: list[str]) -> dict[str, str]:
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in TOKEN_KEYS.items()}
    return {name: entries[int(i)] for name, i in ids.items() if i is not None}


def _template(metadata: Mapping[str, Any], tokens: Mapping[str, str], defaults: Mapping[str, Scalar]) -> ChatTemplate:
    prefix = f"{TEMPLATE_KEY}."
    sources = {key.removeprefix(prefix): str(text) for key, text in metadata.items() if key.startswith(prefix)}
    if metadata.get(TEMPLATE_KEY):
        sources[DEFAULT] = str(metadata[TEMPLATE_KEY])
    if not sources:
        return PlainTemplate()
    return JinjaTemplate(sources, tokens, defaults)
