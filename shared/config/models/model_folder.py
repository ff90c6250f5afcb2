"""A Hugging Face folder's JSON files, read once. All questions about the model are answered from this record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.config.models.json_file import read_json_if_there

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
WITH_ENCODER = ("t5",)  # values of model_type


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`config`, `generation` and `tokenizer`: the files named above; {} without one.

    `path` may also be a .gguf file, which has none of them."""

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, Any]:
        """A model that also sees images describes its text part in `text_config`."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, Mapping) else self.config

    @property
    def architecture(self) -> str:
        return str((self.config.get("architectures") or [self.config.get("model_type") or "?"])[0])

    @property
    def has_encoder(self) -> bool:
        return self.config.get("model_type") in WITH_ENCODER


def read_folder(path: Path) -> ModelFolder:
    """Raise ConfigError for a file that holds no JSON object."""
    return ModelFolder(path, *(read_json_if_there(path / name) for name in (CONFIG, GENERATION, TOKENIZER)))
