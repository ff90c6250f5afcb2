"""Keep the answers' features on disk, in one safetensors file per shard. Compute a missing file when it is needed.

Complete files are renamed into place, so a second process may prepare files for this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from deploy.tools.head.data import TrainingAnswer
from deploy.tools.head.target import TargetNet

Tensor = torch.Tensor
TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class FeatureTrace:
    """One sequence's features: views of its shard's tensors, on the CPU."""

    ids: Tensor  # (n,) int64
    prompt: int
    greedy: bool  # whether the answer was drawn at temperature 0
    aux: Tensor  # (n, 3H)
    final: Tensor  # (n, H)


class FeatureStore:
    def __init__(self, folder: Path, target: TargetNet) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._target = target

    def path(self, shard: Sequence[TrainingAnswer]) -> Path:
        """Return a path for this target, data and order, so that features of another run are never read."""
        content = self._target.identity + repr([one.ids for one in shard])
        digest = hashlib.blake2b(content.encode(), digest_size=12).hexdigest()
        return self._folder / f"{digest}.safetensors"

    def get(self, shard: Sequence[TrainingAnswer]) -> list[FeatureTrace]:
        path = self.path(shard)
        if not path.exists():
            self._compute(shard, path)
        found = load_file(path)
        lengths = [len(one.ids) for one in shard]
        parts = (found[name].split(lengths) for name in ("ids", "aux", "final"))
        return [
            FeatureTrace(ids.long(), len(one.prompt), one.temperature == 0, aux, final)
            for one, ids, aux, final in zip(shard, *parts, strict=True)
        ]

    def _compute(self, shard: Sequence[TrainingAnswer], path: Path) -> None:
        features = [self._target.features([one.ids for one in batch]) for batch in batches(shard, TOKENS_AT_ONCE)]
        tensors = {
            "ids": torch.tensor([token for one in shard for token in one.ids], dtype=torch.int32),
            "aux": torch.cat([one.aux.cpu() for one in features]),
            "final": torch.cat([one.final.cpu() for one in features]),
        }
        part = path.with_suffix(".part")
        save_file(tensors, part)
        part.rename(path)


def batches(shard: Sequence[TrainingAnswer], tokens: int) -> list[list[TrainingAnswer]]:
    """Return batches in order. Each has at most `tokens` tokens, or is one longer sequence."""
    made: list[list[TrainingAnswer]] = []
    room = 0
    for one in shard:
        if len(one.ids) > room:
            made.append([])
            room = tokens
        made[-1].append(one)
        room -= len(one.ids)
    return made
