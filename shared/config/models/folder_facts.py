"""What a Hugging Face folder says of a model's texts. Routers and nodes ask here, so that they agree.

Each fact is looked for in the text part first, then in the rest of config.json, as the library transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config.models.family_defaults import FAMILY_DEFAULTS
from shared.config.models.model_folder import CONFIG, GENERATION, ModelFolder
from shared.config.models.tokenizer_file import id_of_token
from shared.core.errors import ConfigError

ANY_LENGTH = 1 << 20  # a model with relative positions has no length limit
MOST_IDS, MOST_POSITIONS = 1 << 24, 1 << 26
LENGTHS = ("max_position_embeddings", "n_positions")  # GPT-2 has the second name
# Qwen2.5-1M's own code attends in another way beyond the original length. Neither Baton nor the library has that way.
DUAL_CHUNKS, ORIGINAL = "dual_chunk_attention_config", "original_max_position_embeddings"
ENDS, START = "eos_token_id", "decoder_start_token_id"


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """`vocab_size`: the rows of the embedding, some of which may have no token; None if no file says it.

    `eos_ids`: the ids that end an answer. `context_length`: the length that the model was made for; nodes may allow
    less. `start_ids`: an encoder-decoder model's decoder begins with them.
    """

    vocab_size: int | None
    eos_ids: tuple[int, ...]
    context_length: int
    start_ids: tuple[int, ...] = ()


def facts_of(folder: ModelFolder) -> FolderFacts:
    """Raise ConfigError for a wrong value, and for a missing one that has no default."""
    start_ids = (_decoder_start(folder),) if folder.has_encoder else ()
    vocab_size = _vocab_size(folder)
    context_length = ANY_LENGTH if start_ids else _context_length(folder)
    eos_ids = _eos_ids(folder)
    if vocab_size is not None:
        eos_ids = tuple(i for i in eos_ids if i < vocab_size)
    return FolderFacts(vocab_size, eos_ids, context_length, start_ids)


def _decoder_start(folder: ModelFolder) -> int:
    """Return the token that begins the decoder's text. Raise ConfigError if no token is known.

    Look in the same places as transformers, in the same order."""
    candidates = [folder.generation.get(START), folder.config.get(START), folder.config.get("pad_token_id")]
    index = next((value for value in candidates if value is not None), None)
    if not isinstance(index, int) or index < 0:
        raise ConfigError(f"{folder.path / CONFIG}: {START} is {index!r}, so the decoder's text can't begin")
    return index


def _defaults(folder: ModelFolder) -> tuple[int | None, int | None]:
    family = folder.text.get("model_type") or folder.config.get("model_type")
    return FAMILY_DEFAULTS.get(str(family), (None, None))


def _vocab_size(folder: ModelFolder) -> int | None:
    """A wrapper's own size may be another: LLaVA's is that of an older text part."""
    own, (default, _) = folder.text.get("vocab_size"), _defaults(folder)
    found = next((size for size in (own, default, folder.config.get("vocab_size")) if size is not None), None)
    return None if found is None else _whole(found, 1, MOST_IDS, folder.path / CONFIG, "vocab_size")


def _context_length(folder: ModelFolder) -> int:
    text, path = folder.text, folder.path / CONFIG
    _, default = _defaults(folder)
    places = [part.get(name) for part in (text, {LENGTHS[0]: default}, folder.config) for name in LENGTHS]
    found = next((length for length in places if length is not None), None)
    if found is None:
        raise ConfigError(f"{path} does not say {LENGTHS[0]}")
    length = _whole(found, 1, MOST_POSITIONS, path, LENGTHS[0])
    in_chunks = text.get(DUAL_CHUNKS)
    if isinstance(in_chunks, Mapping) and isinstance(in_chunks.get(ORIGINAL), int):
        length = min(length, in_chunks[ORIGINAL])
    try:
        return max(length, *(_stretched(rope, length) for rope in _ropes(text)))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{path}: the rotary positions' lengths can't be read: {error}") from error


def _ropes(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rotary parameters: one set, or one for each kind of layer."""
    both = text.get("rope_parameters") or text.get("rope_scaling")
    found = [both, *both.values()] if isinstance(both, Mapping) else []
    return [{}, *(rope for rope in found if isinstance(rope, Mapping))]


def _stretched(rope: Mapping[str, Any], length: int) -> int:
    """In yarn files, max_position_embeddings is often the length before stretching. A shorter one is a user's limit."""
    if (rope.get("rope_type") or rope.get("type")) != "yarn":
        return length
    original = int(rope.get(ORIGINAL) or length)
    return int(original * float(rope.get("factor") or 1.0)) if original <= length else length


def _eos_ids(folder: ModelFolder) -> tuple[int, ...]:
    """config.json often lacks ids of chat models, so it is read second, and its text part third."""
    for name, part in (
        (GENERATION, folder.generation),
        (CONFIG, folder.config),
        (CONFIG, folder.text),
    ):
        given = part.get(ENDS)
        if given is not None and given != []:
            ids = given if isinstance(given, list) else [given]
            return tuple(_whole(index, 0, MOST_IDS, folder.path / name, ENDS) for index in ids)
    token = folder.tokenizer.get("eos_token")
    index = id_of_token(folder.path, token) if token and (folder.path / "tokenizer.json").is_file() else None
    return () if index is None else (index,)


def _whole(value: object, least: int, most: int, path: Path, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{path}: {name} is {repr(value)[:80]}, not a whole number of {least} to {most}")
    return value
