"""Refuse features by name where a path lacks them.

Pipeline stages (`--pp`) and models with an encoder (T5) are frozen: for each new feature, add a line to their tables,
and call `refuse` where the feature's code begins. Models that the library transformers runs lack their features so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FrozenPath:
    name: str
    lacks: Mapping[str, str]  # missing flag -> reason and replacement

    def refuse(self, asked: Mapping[str, bool], *, given: str = "", of: str = "") -> None:
        """Raise ConfigError if `asked` contains a feature that this path lacks.

        `asked`: flag and value -> whether the user asked for this value. Each flag needs a line in `lacks`.
        `given`: the flags that chose this path. `of`: the model."""
        unknown = [flag for flag in asked if flag.split()[0] not in self.lacks]
        if unknown:  # checked even for flags that the user did not ask for
            raise KeyError(f"{', '.join(unknown)}: no line in the table of {self.name}")
        refused = [flag for flag, is_asked in asked.items() if is_asked]
        if refused:
            raise self.refusal(refused, given=given, of=of)

    def refusal(self, flags: Sequence[str], *, given: str = "", of: str = "") -> ConfigError:
        return ConfigError(f"{' '.join([given, ', '.join(flags)]).strip()}: {self.sentence(*flags, of=of)}")

    def sentence(self, *flags: str, of: str = "") -> str:
        name = f"{self.name} ({of})" if of else self.name
        return f"{name} {', and '.join(dict.fromkeys(self.lacks[flag.split()[0]] for flag in flags))}"


PIPELINE = FrozenPath(
    "pipeline stages",
    {
        "--itl-budget": "have no step times that depend only on the step's tokens; use --mixed-chunk-size",
        "--layer-parts": "do not report finished layers, so pages travel whole",
        "--lora-dir": "load adapters only at the start; use --lora",
    },
)

ENCODER = FrozenPath(
    "models with an encoder",
    {
        "--device": "run on the CPU only; use --device cpu",
        "--itl-budget": "compute a prompt in one piece",
        "--kv-dtype": "keep KV in --dtype",
        "--lora": "have no adapters",
        "--lora-dir": "have no adapters",
        "--offload-bytes": "have no cold tier for their pages",
        "--pp": "are not cut into stages",
        "--spec": "have no draft heads; use --spec ngram or none",
        "--tp": "are not split among ranks; use --dp or one process",
        "--weight-dtype": "keep weights in --dtype",
    },
)

LIBRARY = FrozenPath(
    "models that the library transformers runs",
    {
        "--attention": "have Baton's attention; use auto or baton",
        "--deterministic": "compute with kernels whose results depend on the batch",
        "--lora": "have no adapters",
        "--lora-dir": "have no adapters",
        "--pp": "are not cut into stages",
        "--weight-dtype": "keep weights in --dtype",
    },
)

LIBRARY_RANKS = FrozenPath(
    "models that ranks divide by the library's plan",
    {
        "--kv-dtype": "keep KV in --dtype so far",
        "--spec": "have no draft heads so far; use --spec ngram or none",
    },
)
