"""Rotate the tokens of each row as the library rotates a row alone, where longrope has two sets of frequencies.

    text of at most short_context tokens    the short factors
    longer text                             the long factors, from its first token on

The library takes one set for a whole step: the long one as soon as one position lies beyond `short_context`. So it is
asked twice, for positions that all lie within, and for positions of which one more lies beyond. No step waits for the
device, and no shape changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from shared.core.errors import ConfigError
from shared.model.library.on_device import ROPE_TYPE

LONGROPE = "longrope"
Rotation = tuple[torch.Tensor, ...]  # cos and sin, each (B, T, features)


def short_context_of(config: PreTrainedConfig) -> int:
    """Return the length of the longest text with short factors; 0 for a network without longrope. Raise ConfigError if
    its layers differ."""
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    every = (ropes, *ropes.values())  # one, or one for each kind of layer
    long = [rope for rope in every if isinstance(rope, dict) and rope.get(ROPE_TYPE) == LONGROPE]
    bounds = {int(rope["original_max_position_embeddings"] or 0) for rope in long}
    if len(bounds) > 1 or not all(bounds):
        raise ConfigError(f"{config.model_type}: longrope needs one original_max_position_embeddings for all layers")
    return max(bounds, default=0)


class LongFactors:
    """Owns the rotary modules of one network. Outside of `by_row` they do what the library does."""

    def __init__(self, network: PreTrainedModel) -> None:
        self._short_context = short_context_of(network.config)
        self._is_by_row = False
        self._is_long: torch.Tensor | None = None
        for module in network.modules():
            kinds = getattr(module, ROPE_TYPE, None)  # one, or one for each kind of layer
            if LONGROPE in (kinds.values() if isinstance(kinds, dict) else (kinds,)):
                own: Any = module
                own.forward = functools.partial(self._rotate, own.forward)

    @contextmanager
    def by_row(self, is_long: torch.Tensor | None) -> Iterator[None]:
        """Let the step's tokens be rotated by their rows. is_long: (T,) bool; None: no row is longer."""
        self._is_by_row, self._is_long = True, is_long
        try:
            yield
        finally:
            self._is_by_row, self._is_long = False, None

    def _rotate(
        self, rotate: Callable[..., Rotation], x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **named: Any
    ) -> Rotation:
        """`rotate`: the library's own. position_ids: (1, T) within `by_row`."""
        if not self._is_by_row:
            return rotate(x, position_ids, *args, **named)
        # of a short row, only drafts that are not taken lie beyond
        within = position_ids.clamp(max=self._short_context - 1)
        short = rotate(x, within, *args, **named)
        if self._is_long is None:
            return short
        beyond = torch.full_like(position_ids[:, :1], self._short_context)
        long = rotate(x, torch.cat((position_ids, beyond), dim=1), *args, **named)
        is_long = self._is_long[None, :, None]
        return tuple(torch.where(is_long, b[:, :-1], a) for a, b in zip(short, long, strict=True))
