"""Build tokenizer and chat template from a GGUF file's metadata. Reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from router.text.chat.chat_template import DEFAULT, JinjaTemplate
from router.text.chat.control_tokens import guarded
from router.text.chat.conversation import Scalar
from router.text.chat.interface import ChatTemplate, TextModel, VocabFacts
from router.text.fast_tokenizer import FastTokenizer
from router.text.hashlm import PlainTemplate
from router.text.sentencepiece_bpe import has_space_prefix, sentencepiece_bpe
from router.text.word_splits import TAKES_WHOLE_WORDS, pre_tokenizer
from shared.config.models.gguf_metadata import read_pairs
from shared.config.models.vocabulary import (
    SENTENCEPIECE,
    USER_DEFINED_TYPE,
    described_vocabulary,
    gguf_entries,
    gguf_field,
    gguf_kind,
    gguf_special,
    of_type,
)
from shared.config.settings.text_settings import TextConfig
from shared.core.errors import ConfigError

ARCHITECTURE = "general.architecture"
DESCRIBED = (".context_length", ARCHITECTURE)  # ends of keys
# Phi 3's control tokens take the spaces after them, except these.
PHI3_KEEPS_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})
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


def read_metadata(path: Path) -> dict[str, Any]:
    return read_pairs(path, lambda name: name.startswith("tokenizer.") or name.endswith(DESCRIBED))


def build_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer. Raise ConfigError if the file has another kind of tokenizer."""
    build = sentencepiece_bpe if gguf_kind(metadata) == SENTENCEPIECE else byte_level_bpe
    inner = build(metadata)
    inner.add_special_tokens([_control_token(metadata, entry) for entry in gguf_special(metadata)])
    # SentencePiece finds these after it has replaced spaces, but then a prefix would be part of them
    late = gguf_kind(metadata) == SENTENCEPIECE and not has_space_prefix(metadata)
    inner.add_tokens([AddedToken(entry, normalized=late) for entry in of_type(metadata, USER_DEFINED_TYPE)])
    return inner


def _control_token(metadata: Mapping[str, Any], entry: str) -> AddedToken:
    is_phi3 = metadata.get(ARCHITECTURE) == "phi3" and gguf_kind(metadata) == SENTENCEPIECE
    return AddedToken(entry, normalized=False, rstrip=is_phi3 and entry not in PHI3_KEEPS_SPACES)


def byte_level_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pre = pre_of(metadata)
    vocab = {entry: i for i, entry in enumerate(gguf_entries(metadata))}
    merges = [_split_merge(merge) for merge in gguf_field(metadata, "tokenizer.ggml.merges")]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in TAKES_WHOLE_WORDS))
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizer(pre)
    inner.decoder = decoders.ByteLevel()
    return inner


def pre_of(metadata: Mapping[str, Any]) -> str:
    """Raise ConfigError if a file doesn't say it: each of its families would take other words."""
    if "tokenizer.ggml.pre" not in metadata:
        raise ConfigError("the GGUF file doesn't say how it splits words (tokenizer.ggml.pre): take a newer file")
    return str(metadata["tokenizer.ggml.pre"])


def load_gguf(path: Path, options: TextConfig, edit: Callable[[str], str] = str) -> TextModel:
    """`edit` changes the default chat template."""
    metadata = read_metadata(path)
    if metadata.get(TEMPLATE_KEY):
        metadata[TEMPLATE_KEY] = edit(metadata[TEMPLATE_KEY])
    inner, vocabulary = build_tokenizer(metadata), described_vocabulary(metadata)
    tokenizer = FastTokenizer(
        inner,
        tokens=vocabulary.tokens,
        facts=VocabFacts(
            vocab_size=len(vocabulary.tokens),
            eos_ids=vocabulary.eos_ids,
            special_ids=vocabulary.special_ids,
            context_length=_context_length(metadata),
        ),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id") if _adds_bos(metadata) else None,
        eos_id=metadata.get("tokenizer.ggml.eos_token_id") if metadata.get("tokenizer.ggml.add_eos_token") else None,
    )
    tokens = _template_tokens(metadata, gguf_entries(metadata))
    return TextModel(
        tokenizer=tokenizer,
        template=_template(metadata, tokens, options.template_kwargs),
        control_tokens=guarded(options, gguf_special(metadata)),
        about={**tokens, "model_max_length": tokenizer.facts.context_length},
    )


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Older files don't say it."""
    by_default = gguf_kind(metadata) == SENTENCEPIECE or pre_of(metadata) in TAKES_WHOLE_WORDS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", by_default))


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
