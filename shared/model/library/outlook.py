"""Tell what a folder would take of memory, by its config.json and its tensors' headers: no number is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.config.models.model_folder import read_folder
from shared.core.errors import ConfigError
from shared.kv.layout import PlaneSpec
from shared.model.formats.opened import DTYPES, LoadOptions, context_of, settled
from shared.model.formats.quantized_folder import open_tensors
from shared.model.library.kinds import LIBRARY_VERSION
from shared.model.library.latents import keep_latents, shape_of_layer
from shared.model.library.layer_places import LayerShape, places_of
from shared.model.library.loading import (
    SURVEYED,
    check_memory,
    checked_config,
    explained,
    max_context_of,
    outline_of,
)
from shared.model.library.model import use_attention


@dataclass(frozen=True, slots=True)
class LibraryOutlook:
    """`stored`: the numbers' format in the files. `planes`: of a page of `page_size` tokens. `lacking`: the
    sentence about a memory that is too small; "" for one that suffices."""

    program: str
    stored: str
    weights_bytes: int
    context: int
    planes: tuple[PlaneSpec, ...]
    lacking: str = ""


def look_at(path: Path, options: LoadOptions, page_size: int) -> LibraryOutlook:
    """Raise ConfigError for a folder that the library or our attention can't run, as far as that shows."""
    folder = read_folder(path)
    config = checked_config(folder)
    files = open_tensors(path)
    files.check_scales(files.names())
    dtype = DTYPES[settled(options).dtype]
    context = context_of(max_context_of(folder), options.max_context)
    with explained(path, "make its network"):
        outline: Any = outline_of(config)
        outline.to(dtype)
        num_bytes = sum(parameter.nbytes for parameter in outline.parameters())
        planes = places_of(layers_of(outline)).specs(page_size)
    try:
        check_memory(files, num_bytes, options)
        lacking = ""
    except ConfigError as error:
        lacking = error.message
    return LibraryOutlook(LIBRARY_VERSION, files.described(), num_bytes, context, planes, lacking)


def layers_of(network: Any) -> list[LayerShape]:
    """Return what each layer keeps, by a run of the network without numbers."""
    keep_latents(network)
    shapes = LayerShapes()
    use_attention(network, shapes, shapes.mask)
    ids = torch.zeros(1, SURVEYED, dtype=torch.int64, device="meta")
    with torch.inference_mode():  # without a mask the library would read the positions' numbers
        network(input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return shapes.layers


class LayerShapes:
    """Stands for the attention of a network without numbers, and for the maker of its masks."""

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []

    def mask(self, *, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
        return torch.zeros(1, 1, q_length, kv_length, device="meta")

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        sliding_window: int | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Return zeros, (1, T, heads, output_size)."""
        layer = shape_of_layer(module, query, key, value, int(sliding_window or 0))
        self.layers.append(layer)
        return query.new_zeros(1, query.shape[2], query.shape[1], layer.output_size), None
