"""Read a Hugging Face folder's tokenizer.json, or make one of its tiktoken.model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from shared.config.models import tiktoken_file
from shared.config.models.json_file import read_json_if_there
from shared.config.models.vocab_bytes import byte_level_decoder, metaspace_bytes
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """`special`: the tokens that are never text, by id. `literal`: the added tokens whose bytes are their text."""

    inner: tokenizers.Tokenizer
    is_byte_level: bool
    special: Mapping[int, str]
    literal: frozenset[str]

    @property
    def entry_bytes(self) -> Callable[[str], bytes]:
        """Return what turns entries into bytes."""
        return byte_level_decoder() if self.is_byte_level else metaspace_bytes


def read_tokenizer(folder: Path) -> TokenizerFile:
    """Raise ConfigError if there is no tokenizer.json, or one that can't be used."""
    inner = _opened(folder)
    described = read_json_if_there(folder / "tokenizer.json") or json.loads(inner.to_str())
    is_byte_level = "ByteLevel" in repr(described.get("decoder"))
    added = described.get("added_tokens") or []  # the library has checked their shape
    return TokenizerFile(
        inner,
        is_byte_level,
        special={int(token["id"]): token["content"] for token in added if token["special"]},
        # in a metaspace vocabulary, these are the special tokens
        literal=frozenset(token["content"] for token in added if token["special"] or is_byte_level),
    )


def id_of_token(folder: Path, token: object) -> int | None:
    """Return the id of a token as tokenizer_config.json names it; None if it names none, or an unknown one."""
    content = token_content(token)
    found: int | None = _opened(folder).token_to_id(content) if content else None
    return found


def token_content(token: object) -> str:
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return str(token or "")


def _opened(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file() and (folder / tiktoken_file.NAME).is_file():
        return tiktoken_file.read_tiktoken(folder)
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"{path} can't be used: {error}") from error
