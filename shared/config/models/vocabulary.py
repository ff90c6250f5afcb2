"""Read the bytes of each token id from tokenizer files, for decoding (routers) and grammars (nodes)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared.config.models.folder_facts import FolderFacts, facts_of
from shared.config.models.gguf_metadata import read_pairs
from shared.config.models.model_folder import read_folder
from shared.config.models.model_path import ModelKind, resolve_model
from shared.config.models.pieces import make_pieces
from shared.config.models.tokenizer_file import TokenizerFile, read_tokenizer
from shared.config.models.vocab_bytes import METASPACE, Vocabulary, byte_level_decoder, byte_table, metaspace_bytes
from shared.core.errors import ConfigError

TEXT_TYPE, UNKNOWN_TYPE, CONTROL_TYPE, USER_DEFINED_TYPE = 1, 2, 3, 4  # GGUF's numbers for kinds of tokens
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # GGUF's names for kinds of tokenizers
TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})
TURN_BEGINS = frozenset({"<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>"})
HASHLM_FIRST_CHAR, HASHLM_EOS = 32, 95


def read_vocabulary(model: str) -> Vocabulary:
    """Raise ConfigError if the model has no supported tokenizer."""
    source = resolve_model(model, with_weights=False)
    if source.kind is ModelKind.SCRIPTED:
        return make_pieces().vocabulary
    if source.path is None:
        return hashlm_vocabulary()
    read = folder_vocabulary if source.kind is ModelKind.HF_FOLDER else gguf_vocabulary
    return read(source.path)


def hashlm_vocabulary() -> Vocabulary:
    chars = tuple(bytes((HASHLM_FIRST_CHAR + i,)) for i in range(HASHLM_EOS))
    return Vocabulary((*chars, b"<eos>"), (HASHLM_EOS,), frozenset({HASHLM_EOS}))


def folder_vocabulary(folder: Path) -> Vocabulary:
    return vocabulary_of(read_tokenizer(folder), facts_of(read_folder(folder)))


def vocabulary_of(file: TokenizerFile, facts: FolderFacts) -> Vocabulary:
    """Return as many tokens as the model has, though the file may have fewer."""
    entries = file.inner.get_vocab(with_added_tokens=True)
    size = facts.vocab_size or file.inner.get_vocab_size(with_added_tokens=True)
    return Vocabulary(
        tokens=tuple(byte_table(entries, file.literal, file.entry_bytes, size)),
        eos_ids=facts.eos_ids,
        special_ids=frozenset(index for index in file.special if index < size),
    )


def gguf_vocabulary(path: Path) -> Vocabulary:
    return described_vocabulary(read_pairs(path, lambda name: name.startswith("tokenizer.")))


def described_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Return what a GGUF header describes."""
    entries, special = gguf_entries(metadata), gguf_special(metadata)
    index = {entry: i for i, entry in enumerate(entries)}
    return Vocabulary(
        tokens=tuple(byte_table(index, gguf_literals(metadata), gguf_spelling(metadata), len(entries))),
        eos_ids=gguf_eos_ids(metadata),
        special_ids=frozenset(index[entry] for entry in special),
    )


def gguf_kind(metadata: Mapping[str, Any]) -> str:
    """Raise ConfigError for a kind of tokenizer that is not read."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        raise ConfigError(
            f"the GGUF file has a tokenizer of kind {kind!r}; only byte-level BPE ({BYTE_LEVEL!r}) and SentencePiece "
            f"({SENTENCEPIECE!r}) are read here"
        )
    return str(kind)


def gguf_spelling(metadata: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return what turns entries into bytes."""
    return byte_level_decoder() if gguf_kind(metadata) == BYTE_LEVEL else metaspace_bytes


def gguf_field(metadata: Mapping[str, Any], name: str) -> list[Any]:
    if name not in metadata:
        raise ConfigError(f"the GGUF file lacks {name}, so its tokenizer can't be built")
    found: list[Any] = metadata[name]
    return found


def gguf_entries(metadata: Mapping[str, Any]) -> list[str]:
    """Return all entries by id. SentencePiece's user-defined entries are as in a text: with spaces instead of "▁"."""
    entries = gguf_field(metadata, "tokenizer.ggml.tokens")
    if metadata.get("tokenizer.ggml.model") != SENTENCEPIECE:
        return entries
    types = metadata.get("tokenizer.ggml.token_type") or []
    plain = {i for i, own in enumerate(types) if own == USER_DEFINED_TYPE}
    return [entry.replace(METASPACE, " ") if i in plain else entry for i, entry in enumerate(entries)]


def gguf_special(metadata: Mapping[str, Any]) -> list[str]:
    """Return the entries that are never text."""
    return of_type(metadata, CONTROL_TYPE, UNKNOWN_TYPE)


def gguf_literals(metadata: Mapping[str, Any]) -> frozenset[str]:
    """Return the entries whose bytes are their text."""
    return frozenset(of_type(metadata, CONTROL_TYPE, UNKNOWN_TYPE, USER_DEFINED_TYPE))


def of_type(metadata: Mapping[str, Any], *kinds: int) -> list[str]:
    """Old files call the marks of turns user-defined. As text, a message could hold them."""
    types = metadata.get("tokenizer.ggml.token_type", [])
    marks = TURN_ENDS | TURN_BEGINS
    return [
        entry
        for entry, own in zip(gguf_entries(metadata), types, strict=False)
        if (CONTROL_TYPE if own == USER_DEFINED_TYPE and entry in marks else own) in kinds
    ]


def gguf_eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end an answer. Many files name only the end of a document, so the control tokens that end a
    turn of a chat are added by their spelling."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [int(metadata[name]) for name in names if name in metadata]
    if "tokenizer.ggml.tokens" in metadata:
        entries, special = gguf_entries(metadata), set(gguf_special(metadata))
        ids += [i for i, entry in enumerate(entries) if entry in TURN_ENDS and entry in special]
    return tuple(dict.fromkeys(ids))
