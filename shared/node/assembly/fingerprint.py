"""Make a node's fingerprint: two nodes pair only if they would produce the same tokens."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from shared.core.extras import DISTRIBUTION
from shared.engine.drafter import Drafter
from shared.kv.layout import PlaneSpec, page_windows
from shared.model.math.interface import ModelSpec
from shared.wire.fitting import NO_DRAFT_STATE, NO_GRAMMAR, PLANE_SEPARATOR, WINDOWS, misfit
from shared.wire.messages import PROTOCOL_VERSION, Fingerprint

NUMERICS_VERSION = 7  # increase this if the same weights, seed and prompt may now yield different tokens


def build_name() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "source"


def make_fingerprint(
    spec: ModelSpec,
    planes: Sequence[PlaneSpec],
    page_size: int,
    drafter: Drafter | None,
    build: str,
    grammar: str = NO_GRAMMAR,
    num_parts: int = 1,
) -> Fingerprint:
    """`grammar`: the version of the Grammars. `num_parts`: of KVPool.

    The draft width is left out, because paired nodes may differ in it."""
    parts = [f"{num_parts} parts"] if num_parts > 1 else []
    return Fingerprint(
        protocol=PROTOCOL_VERSION,
        numerics=NUMERICS_VERSION,
        model=spec.name,
        weights=spec.weights_hash,
        dtype=spec.dtype,
        page_size=page_size,
        page_layout=PLANE_SEPARATOR.join([*_window_name(planes), *map(_plane_name, planes), *parts]),
        spec=drafter.state_name if drafter is not None else NO_DRAFT_STATE,
        build=build,
        grammar=grammar,
    )


def _window_name(planes: Sequence[PlaneSpec]) -> list[str]:
    """Name the windows, because nodes with different windows need different pages."""
    windows = page_windows(tuple(planes))
    return [WINDOWS + ",".join(map(str, windows))] if any(windows) else []


def _plane_name(plane: PlaneSpec) -> str:
    return f"{plane.name}:{'x'.join(map(str, plane.shape))}:{plane.dtype}"


def difference(ours: Fingerprint, theirs: Fingerprint) -> str:
    """Return why a peer's pages (`theirs`) don't fit ours; empty if they fit."""
    name = misfit(theirs, ours)
    return f"{name} differs: {getattr(ours, name)} here, {getattr(theirs, name)} there" if name is not None else ""
