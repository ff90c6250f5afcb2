"""Frozen paths: pipeline stages (`--pp`) and models with an encoder (T5). They stay and stay tested, and get no new
features. What each of them lacks has a line in its table: a new feature adds one, and asks `refuse` where it begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FrozenPath:
    name: str
    lacks: Mapping[str, str]  # by flag: why, or what to take instead

    def refuse(self, asked: Mapping[str, bool], *, given: str = "", of: str = "") -> None:
        """Raise a ConfigError that names what was asked and is lacking. Keys are flags with their values, each with a
        line in `lacks`. `given`: flags that chose this path. `of`: the model."""
        unknown = [flag for flag in asked if flag.split()[0] not in self.lacks]
        if unknown:  # said whether anybody asked for it or not
            raise KeyError(f"{', '.join(unknown)}: no line in the table of {self.name}")
        refused = [flag for flag, is_asked in asked.items() if is_asked]
        if refused:
            raise self.refusal(refused, given=given, of=of)

    def refusal(self, flags: Sequence[str], *, given: str = "", of: str = "") -> ConfigError:
        """Return the error that says why these flags can't be had."""
        return ConfigError(f"{' '.join([given, ', '.join(flags)]).strip()}: {self.sentence(*flags, of=of)}")

    def sentence(self, *flags: str, of: str = "") -> str:
        """Say what this path does in place of these flags."""
        name = f"{self.name} ({of})" if of else self.name
        return f"{name} {', and '.join(dict.fromkeys(self.lacks[flag.split()[0]] for flag in flags))}"


PIPELINE = FrozenPath(
    "pipeline stages",
    {
        "--device": "would need a device and pages of their own; use --device cpu",
        "--itl-budget": "have no step whose time is that of its own tokens; use --mixed-chunk-size",
        "--layer-parts": "do not tell how far their layers are, so pages travel whole",
    },
)

ENCODER = FrozenPath(
    "models with an encoder",
    {
        "--device": "run on the CPU only; use --device cpu",
        "--itl-budget": "compute a prompt in one piece",
        "--kv-dtype": "keep KV in the numbers of --dtype",
        "--lora": "have no adapters",
        "--offload-bytes": "have no cold tier for their pages",
        "--pp": "are not cut into stages",
        "--spec": "have no draft heads; take --spec ngram or none",
        "--tp": "are not shared out among ranks; take --dp or one",
        "--weight-dtype": "keep weights in the numbers of --dtype",
    },
)
