"""Find which nodes can work together, by comparing the few kinds of nodes.

A kind is a role and a fingerprint without `build` and `grammar`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from shared.wire.fitting import apart, other_pages
from shared.wire.messages import Fingerprint, Hello
from shared.wire.versions import knows

Misfit = tuple[str, str, str]  # node, other node, the field that differs


@dataclass(slots=True, eq=False)
class Kind:
    """Nodes whose pages and records are interchangeable."""

    role: str
    fingerprint: Fingerprint
    node_ids: dict[str, None] = field(default_factory=dict)  # in order of arrival
    apart: dict[Kind, str] = field(default_factory=dict)  # kind that does not fit -> first differing field
    neighbours: list[Kind] = field(default_factory=list)  # kinds of its role that only have a neighbouring protocol

    @property
    def first(self) -> str:
        return next(iter(self.node_ids))


class Kinds:
    def __init__(self) -> None:
        self._kinds: dict[tuple[str, Fingerprint], Kind] = {}
        self._misfits: list[Misfit] | None = []  # None if they must be computed again

    def join(self, hello: Hello) -> Kind:
        name = (hello.role, msgspec.structs.replace(hello.fingerprint, build="", grammar=""))
        kind = self._kinds.get(name) or self._add(name)
        kind.node_ids[hello.node_id] = None
        self._misfits = None
        return kind

    def leave(self, kind: Kind, node_id: str) -> None:
        kind.node_ids.pop(node_id, None)
        self._misfits = None
        if kind.node_ids:
            return
        self._kinds.pop((kind.role, kind.fingerprint), None)
        for other in kind.apart:
            other.apart.pop(kind, None)
        for other in kind.neighbours:
            other.neighbours.remove(kind)

    def _add(self, name: tuple[str, Fingerprint]) -> Kind:
        kind = Kind(*name)
        for other in self._kinds.values():
            differs = apart(kind.role, kind.fingerprint, other.role, other.fingerprint)
            if differs is not None:
                kind.apart[other] = other.apart[kind] = differs
            elif kind.role == other.role and other_pages(kind.fingerprint, other.fingerprint) is None:
                kind.neighbours.append(other)
                other.neighbours.append(kind)
        self._kinds[name] = kind
        return kind

    def all_know(self, role: str, name: str) -> bool:
        """Return whether all nodes of this role know what `name` names in shared/wire/versions.py."""
        return all(knows(kind.fingerprint.protocol, name) for kind in self._kinds.values() if kind.role == role)

    def misfits(self) -> list[Misfit]:
        """Return pairs of nodes that can't work together, one pair for each node of the smaller kind."""
        if self._misfits is None:
            self._misfits = sorted(self._find())
        return self._misfits

    def _find(self) -> Iterator[Misfit]:
        kinds = list(self._kinds.values())
        for index, one in enumerate(kinds):
            for other in kinds[index + 1 :]:
                if other in one.apart:
                    few, many = sorted((other, one), key=lambda kind: len(kind.node_ids))
                    yield from (misfit(node_id, many, few.apart[many]) for node_id in few.node_ids)


def misfit(node_id: str, other: Kind, differs: str) -> Misfit:
    first, second = sorted((node_id, other.first))
    return first, second, differs
