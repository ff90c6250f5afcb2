"""Which nodes fit together: two fingerprints, and the field in which they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from shared.kv.layout import PlaneSpec
from shared.model.interface import ModelSpec
from shared.wire.messages import PROTOCOL_VERSION, Fingerprint

NUMERICS_VERSION = 1  # rises when the same weights, seed and prompt may give other tokens than before
REPORTED_ONLY = ("build",)


def make_fingerprint(
    spec: ModelSpec, planes: Sequence[PlaneSpec], page_size: int, draft: str, build: str
) -> Fingerprint:
    """`draft` names the draft algorithm and its width, or is "none"."""
    layout = ";".join(f"{plane.name}:{'x'.join(map(str, plane.shape))}:{plane.dtype}" for plane in planes)
    return Fingerprint(
        protocol=PROTOCOL_VERSION,
        numerics=NUMERICS_VERSION,
        model=spec.name,
        weights=spec.weights_hash,
        dtype=spec.dtype,
        page_size=page_size,
        page_layout=hashlib.sha256(layout.encode()).hexdigest()[:16],
        spec=draft,
        build=build,
    )


def difference(ours: Fingerprint, theirs: Fingerprint) -> str:
    """Names the first field that keeps two nodes apart; empty when they fit."""
    for field in msgspec.structs.fields(Fingerprint):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name not in REPORTED_ONLY and mine != other:
            return f"{field.name} differs: {mine} here, {other} there"
    return ""
