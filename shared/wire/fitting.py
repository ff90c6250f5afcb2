"""Decides whether a node can use another node's pages and records.

A decode node with a draft head fits a prefill node without one, if its planes begin with the prefill node's planes.
"""

from __future__ import annotations

from shared.wire.messages import Fingerprint
from shared.wire.versions import work_together

REPORTED_ONLY = ("build", "grammar")  # `grammar` matters only to requests with a grammar; see Prealloc
PREFILL = "prefill"
NO_DRAFT_STATE = "none"
NO_GRAMMAR = "none"  # of nodes that follow no grammars; after it comes the reason
BECAUSE = ": "
PLANE_SEPARATOR = ";"
BY_LIBRARY = " by "  # in the name of weights that a library's layers run: then comes the library's version
WINDOWS = "window "  # begins a page layout with windows; then the window of each page group


def misfit(prefill: Fingerprint, decode: Fingerprint) -> str | None:
    """Return the first field that keeps these nodes from pairing, or None."""
    lacks_head = prefill.spec == NO_DRAFT_STATE != decode.spec
    for name in Fingerprint.__struct_fields__:
        if name in REPORTED_ONLY or getattr(prefill, name) == getattr(decode, name):
            continue
        if name == "protocol" and work_together(prefill.protocol, decode.protocol):
            continue
        if lacks_head and (name == "spec" or (name == "page_layout" and _leads(prefill, decode))):
            continue
        return name
    return None


def other_pages(one: Fingerprint, other: Fingerprint) -> str | None:
    """Return a field that keeps two nodes from using each other's pages, or None. Draft planes are compared, too,
    because both nodes use every plane."""
    return misfit(one, other) or misfit(other, one)


def apart(role: str, first: Fingerprint, other_role: str, second: Fingerprint) -> str | None:
    """Return `misfit`'s result for nodes of any roles. Nodes of one role fit if one could prefill for the other."""
    if role != other_role:
        return misfit(first, second) if role == PREFILL else misfit(second, first)
    name = misfit(first, second)
    return name and misfit(second, first) and name


def no_grammar_because(why: str) -> str:
    return f"{NO_GRAMMAR}{BECAUSE}{why}"


def why_no_grammar(fingerprint: Fingerprint) -> str:
    """Return why the node follows no grammars; "" if it follows some."""
    name, _, why = fingerprint.grammar.partition(BECAUSE)
    return (why or "its version does not say why") if name == NO_GRAMMAR else ""


def runs_by_library(fingerprint: Fingerprint) -> bool:
    """Return whether a library's layers run the model: their rounding depends on the batch, so near ties may flip."""
    return BY_LIBRARY in fingerprint.weights


def num_page_groups(fingerprint: Fingerprint) -> int:
    """Return how many pages a page of tokens takes."""
    first, _, _ = fingerprint.page_layout.partition(PLANE_SEPARATOR)
    return 1 + first.count(",") if first.startswith(WINDOWS) else 1


def _leads(prefill: Fingerprint, decode: Fingerprint) -> bool:
    first, all_planes = (each.page_layout.split(PLANE_SEPARATOR) for each in (prefill, decode))
    return all_planes[: len(first)] == first
