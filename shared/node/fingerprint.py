"""What a node says about itself, so that only those pair that give one another's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.drafter import Drafter
from shared.kv.layout import PlaneSpec, pool_window
from shared.model.interface import ModelSpec
from shared.wire.fitting import NO_DRAFT_STATE, NO_GRAMMAR, PLANE_SEPARATOR, misfit
from shared.wire.messages import PROTOCOL_VERSION, Fingerprint

NUMERICS_VERSION = 2  # rises when the same weights, seed and prompt may give other tokens than before


def make_fingerprint(
    spec: ModelSpec,
    planes: Sequence[PlaneSpec],
    page_size: int,
    drafter: Drafter | None,
    build: str,
    grammar: str = NO_GRAMMAR,
) -> Fingerprint:
    """How far a node drafts is its own affair: the width is not in it. `grammar`: of its Grammars, their version."""
    return Fingerprint(
        protocol=PROTOCOL_VERSION,
        numerics=NUMERICS_VERSION,
        model=spec.name,
        weights=spec.weights_hash,
        dtype=spec.dtype,
        page_size=page_size,
        page_layout=PLANE_SEPARATOR.join([*_window_name(planes), *map(_plane_name, planes)]),
        spec=drafter.state_name if drafter is not None else NO_DRAFT_STATE,
        build=build,
        grammar=grammar,
    )


def _window_name(planes: Sequence[PlaneSpec]) -> list[str]:
    """First, so that nodes which leave pages behind fit none that will ask for them."""
    window = pool_window(tuple(planes))
    return [f"window {window}"] if window else []


def _plane_name(plane: PlaneSpec) -> str:
    return f"{plane.name}:{'x'.join(map(str, plane.shape))}:{plane.dtype}"


def difference(ours: Fingerprint, theirs: Fingerprint) -> str:
    """What keeps a prefill node's pages (`theirs`) from being of use to us; empty when they are."""
    name = misfit(theirs, ours)
    return f"{name} differs: {getattr(ours, name)} here, {getattr(theirs, name)} there" if name is not None else ""
