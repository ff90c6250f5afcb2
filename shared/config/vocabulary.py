"""Read the bytes of each token id from tokenizer files, for decoding (routers) and grammars (nodes)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from shared.config.gguf_metadata import read_pairs
from shared.config.json_file import read_json_if_there
from shared.config.model_path import ModelKind, resolve_model
from shared.config.pieces import make_pieces
from shared.config.vocab_bytes import Vocabulary, byte_level_decoder, byte_table, metaspace_bytes
from shared.core.errors import ConfigError

CONTROL_TYPE = 3  # GGUF's number for control tokens
USER_DEFINED_TYPE = 4
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
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(str(path))
    described, config = read_json_if_there(path), read_json_if_there(folder / "config.json")
    added = {int(token["id"]): token for token in described.get("added_tokens", [])}
    size = int(config.get("vocab_size") or inner.get_vocab_size(with_added_tokens=True))
    entry_bytes = byte_level_decoder() if is_byte_level(described) else metaspace_bytes
    return Vocabulary(
        tokens=tuple(
            byte_table(inner.get_vocab(with_added_tokens=True), literal_entries(described), entry_bytes, size)
        ),
        eos_ids=folder_eos_ids(folder, inner),
        special_ids=frozenset(index for index, token in added.items() if token.get("special")),
    )


def is_byte_level(described: Mapping[str, Any]) -> bool:
    return "ByteLevel" in repr(described.get("decoder"))


def literal_entries(described: Mapping[str, Any]) -> frozenset[str]:
    """Return the added tokens whose bytes are their text. In a metaspace vocabulary, these are the special tokens."""
    added = described.get("added_tokens", [])
    return frozenset(str(token["content"]) for token in added if token.get("special") or is_byte_level(described))


def folder_eos_ids(folder: Path, inner: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the ids that end an answer. config.json often lacks ids of chat models, so it is read second."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json_if_there(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    token = read_json_if_there(folder / "tokenizer_config.json").get("eos_token")
    index = inner.token_to_id(token_content(token))
    return () if index is None else (index,)


def token_content(token: object) -> str:
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return str(token or "")


def gguf_vocabulary(path: Path) -> Vocabulary:
    metadata = read_pairs(path, lambda name: name.startswith("tokenizer."))
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        raise ConfigError(f"{path} has an unsupported tokenizer; only byte-level BPE is read")
    entries: list[str] = metadata["tokenizer.ggml.tokens"]
    control = of_type(metadata, CONTROL_TYPE)
    index = {entry: i for i, entry in enumerate(entries)}
    names = frozenset((*control, *of_type(metadata, USER_DEFINED_TYPE)))
    return Vocabulary(
        tokens=tuple(byte_table(index, names, byte_level_decoder(), len(entries))),
        eos_ids=gguf_eos_ids(metadata),
        special_ids=frozenset(index[entry] for entry in control),
    )


def of_type(metadata: Mapping[str, Any], kind: int) -> list[str]:
    types = metadata.get("tokenizer.ggml.token_type", [])
    return [entry for entry, own in zip(metadata["tokenizer.ggml.tokens"], types, strict=False) if own == kind]


def gguf_eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(int(metadata[name]) for name in names if name in metadata))
