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
from shared.model.library.attend.layer_places import LayerShape, places_of
from shared.model.library.kinds import LIBRARY_VERSION
from shared.model.library.loading import (
    SURVEYED,
    bytes_in,
    check_memory,
    checked_config,
    explained,
    keep_own,
    max_context_of,
    outline_of,
)
from shared.model.library.model import use_attention
from shared.model.library.survey import LayerSurvey


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
    limit = max_context_of(folder)
    context = context_of(limit, options.max_context)
    with explained(path, "make its network"):
        outline: Any = outline_of(config)
        outline.to(dtype)
        num_bytes = bytes_in(outline, dtype)
        planes = places_of(layers_of(outline, limit)).specs(page_size)
    try:
        check_memory(files, num_bytes, options)
        lacking = ""
    except ConfigError as error:
        lacking = error.message
    return LibraryOutlook(LIBRARY_VERSION, files.described(), num_bytes, context, planes, lacking)


def layers_of(network: Any, max_context: int) -> list[LayerShape]:
    """Return what each layer keeps, by a survey of the network without numbers, which have no masks to read."""
    keep_own(network)
    survey = LayerSurvey(max_context)
    use_attention(network, survey, lambda **_: None)
    ids = torch.zeros(1, SURVEYED, dtype=torch.int64, device="meta")
    with torch.inference_mode():  # without a mask the library would read the positions' numbers
        network(input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return survey.layers
