"""Read the sampling values for fields that a request lacks: the model's own, neutral ones, or a file's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from router.api.fields.fields import GenerationFields
from shared.config.models import shipped_model
from shared.config.models.gguf_metadata import read_pairs
from shared.config.models.json_file import read_json_if_there
from shared.config.models.model_path import ModelKind, resolve_model
from shared.config.settings.text_settings import MODELS_OWN
from shared.core.errors import ConfigError
from shared.core.sampling_params import NEUTRAL, SamplingValues

NAMES = tuple(field.name for field in fields(NEUTRAL))
GGUF_PREFIX = "general.sampling."
GGUF_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}  # other names are equal
READ_ELSEWHERE = frozenset({"eos_token_id", "decoder_start_token_id"})


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`source`: where the values are from. `unused`: names of values there that have no effect."""

    values: SamplingValues
    source: str
    unused: tuple[str, ...] = ()


def load_sampling_defaults(wanted: str, model: str) -> SamplingDefaults:
    """`wanted`: the value of --sampling-defaults. Raise ConfigError for a missing file and for impossible values."""
    if wanted == "neutral":
        return SamplingDefaults(NEUTRAL, wanted)
    if wanted != MODELS_OWN:
        path = Path(wanted).expanduser()
        if not path.is_file():
            raise ConfigError(f"--sampling-defaults {wanted}: there is no such file; write model, neutral or a file")
        return _checked(read_json_if_there(path), wanted)
    if model == shipped_model.NAME:
        return SamplingDefaults(shipped_model.SAMPLING, "Baton")
    source = resolve_model(model, with_weights=False)
    if source.path is None:
        return SamplingDefaults(NEUTRAL, model)
    if source.kind is ModelKind.HF_FOLDER:
        path = source.path / "generation_config.json"
        return _checked(read_json_if_there(path), str(path))
    return _checked(_of_gguf(source.path), str(source.path))


def _of_gguf(path: Path) -> dict[str, Any]:
    pairs = read_pairs(path, lambda key: key.startswith(GGUF_PREFIX))
    own = {key.removeprefix(GGUF_PREFIX): value for key, value in pairs.items()}
    return {GGUF_NAMES.get(name, name): _rounded(value) for name, value in own.items()}


def _rounded(value: Any) -> Any:
    """GGUF has float32, in which 0.6 is 0.60000002."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _checked(given: Mapping[str, Any], source: str) -> SamplingDefaults:
    """The limits are those of a request's fields."""
    given = {name: value for name, value in given.items() if value is not None}
    own = {name: given[name] for name in NAMES if name in given}
    try:
        body = msgspec.convert(own, GenerationFields)
    except msgspec.ValidationError as error:
        raise ConfigError(f"sampling defaults, {source}: {error}; see --sampling-defaults") from None
    unused = tuple(sorted(given.keys() - own.keys() - READ_ELSEWHERE))
    return SamplingDefaults(SamplingValues(**{name: getattr(body, name) for name in own}), source, unused)
