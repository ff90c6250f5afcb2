"""Whether the pages and records of one node are of use to another. Knows nothing of what the fields stand for, but for
draft heads: a prefill node without one works with a decode node that has one, for its pages are a part of theirs."""

from __future__ import annotations

from shared.wire.messages import Fingerprint

REPORTED_ONLY = ("build", "grammar")  # the latter counts for requests that have one; see Prealloc
PREFILL = "prefill"
NO_DRAFT_STATE = "none"
NO_GRAMMAR = "none"
PLANE_SEPARATOR = ";"


def misfit(prefill: Fingerprint, decode: Fingerprint) -> str | None:
    """Name of the first field that keeps the two from being a pair; None when they are one."""
    lacks_head = prefill.spec == NO_DRAFT_STATE != decode.spec
    for name in Fingerprint.__struct_fields__:
        if name in REPORTED_ONLY or getattr(prefill, name) == getattr(decode, name):
            continue
        if lacks_head and (name == "spec" or (name == "page_layout" and _leads(prefill, decode))):
            continue
        return name
    return None


def apart(role: str, first: Fingerprint, other_role: str, second: Fingerprint) -> str | None:
    """Return the field that keeps two nodes from being a pair, whichever of them prefills; None when they can be one.

    Nodes of one role can be a pair when one of them could prefill for the other."""
    if role != other_role:
        return misfit(first, second) if role == PREFILL else misfit(second, first)
    name = misfit(first, second)
    return name and misfit(second, first) and name


def _leads(prefill: Fingerprint, decode: Fingerprint) -> bool:
    """Whether the planes of one are the first planes of the other."""
    first, all_planes = (each.page_layout.split(PLANE_SEPARATOR) for each in (prefill, decode))
    return all_planes[: len(first)] == first
