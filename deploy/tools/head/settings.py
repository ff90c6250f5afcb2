"""Options of `baton head evaluate`. The classes' fields define flags, limits and help texts."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.settings.hub_settings import OFFLINE_HELP
from shared.config.settings.options import Settings, option


@dataclass(frozen=True, slots=True)
class AcceptanceSettings(Settings):
    """the prompts and draft chains for measuring acceptance"""

    head: str = option("auto", "folder of the head; auto: the head shipped for the model", metavar="DIR")
    prompts: str = option("", "one {kind, prompt} per line; empty: our own file, with five kinds", metavar="FILE")
    max_new: int = option(128, "ids of an answer, at most", low=8)
    chain: int = option(5, "drafts in a row, at most", low=1, high=16)
    rows: int = option(12, "answers made at a time", low=1)


@dataclass(frozen=True, slots=True)
class TargetSettings(Settings):
    """the model, and where it runs"""

    model: str = option(
        "smollm2", "the target: smollm2, a .gguf file, a Hugging Face folder, or the hub's org/name", metavar="MODEL"
    )
    offline: bool = option(False, OFFLINE_HELP)
    device: str = option("cpu", "torch device; only cpu has been tried", metavar="NAME")
    threads: int = option(1, "threads of torch", low=1)
    dtype: str = option("bfloat16", "number format of weights in matrix products", choices=("float32", "bfloat16"))


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    test: AcceptanceSettings
    target: TargetSettings
