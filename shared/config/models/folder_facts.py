"""Read what a Hugging Face folder says of a model's texts. Routers and nodes read it here, so that they agree.

A model that also sees images describes its text part in `text_config`. Each fact is looked for there first, then in the
rest of config.json, as the library transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config.models.encoder_decoder import decoder_start_id, has_encoder
from shared.config.models.family_defaults import FAMILY_DEFAULTS
from shared.config.models.json_file import read_json_if_there
from shared.config.models.tokenizer_file import id_of_token
from shared.core.errors import ConfigError

CONFIG, GENERATION = "config.json", "generation_config.json"
ANY_LENGTH = 1 << 20  # a model with relative positions has no length limit
MOST_IDS, MOST_POSITIONS = 1 << 24, 1 << 26
LENGTHS = ("max_position_embeddings", "n_positions")  # GPT-2 has the second name
ENDS = "eos_token_id"


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


def read_facts(folder: Path) -> FolderFacts:
    """Raise ConfigError for a wrong value, and for a missing one that has no default."""
    config = read_json_if_there(folder / CONFIG)
    start_ids = (decoder_start_id(folder, config),) if has_encoder(config) else ()
    vocab_size = _vocab_size(folder, config)
    eos_ids = _eos_ids(folder, config)
    return FolderFacts(
        vocab_size,
        eos_ids if vocab_size is None else tuple(i for i in eos_ids if i < vocab_size),
        ANY_LENGTH if start_ids else _context_length(folder, config),
        start_ids,
    )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _defaults(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    family = text_part(config).get("model_type") or config.get("model_type")
    return FAMILY_DEFAULTS.get(str(family), (None, None))


def _vocab_size(folder: Path, config: Mapping[str, Any]) -> int | None:
    """A wrapper's own size may be another: LLaVA's is that of an older text part."""
    own, (default, _) = text_part(config).get("vocab_size"), _defaults(config)
    found = next((size for size in (own, default, config.get("vocab_size")) if size is not None), None)
    return None if found is None else _whole(found, 1, MOST_IDS, folder / CONFIG, "vocab_size")


def _context_length(folder: Path, config: Mapping[str, Any]) -> int:
    text, path = text_part(config), folder / CONFIG
    _, default = _defaults(config)
    places = [part.get(name) for part in (text, {LENGTHS[0]: default}, config) for name in LENGTHS]
    found = next((length for length in places if length is not None), None)
    if found is None:
        raise ConfigError(f"{path} does not say {LENGTHS[0]}")
    length = _whole(found, 1, MOST_POSITIONS, path, LENGTHS[0])
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
    original = int(rope.get("original_max_position_embeddings") or length)
    return int(original * float(rope.get("factor") or 1.0)) if original <= length else length


def _eos_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """config.json often lacks ids of chat models, so it is read second, and its text part third."""
    for name, part in (
        (GENERATION, read_json_if_there(folder / GENERATION)),
        (CONFIG, config),
        (CONFIG, text_part(config)),
    ):
        given = part.get(ENDS)
        if given is not None and given != []:
            ids = given if isinstance(given, list) else [given]
            return tuple(_whole(index, 0, MOST_IDS, folder / name, ENDS) for index in ids)
    token = read_json_if_there(folder / "tokenizer_config.json").get("eos_token")
    index = id_of_token(folder, token) if token and (folder / "tokenizer.json").is_file() else None
    return () if index is None else (index,)


def _whole(value: object, least: int, most: int, path: Path, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{path}: {name} is {repr(value)[:80]}, not a whole number of {least} to {most}")
    return value
