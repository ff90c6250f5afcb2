"""Which nodes can work together, asked once for two kinds and not for two nodes: a cluster has hundreds of nodes and
few kinds. A kind is a role and a fingerprint. Knows nothing of requests and of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from shared.wire.fitting import apart
from shared.wire.messages import Fingerprint, Hello

Misfit = tuple[str, str, str]  # node, other node, the field that differs


@dataclass(slots=True, eq=False)
class Kind:
    """Nodes that nobody can tell apart when it comes to pages and records."""

    role: str
    fingerprint: Fingerprint
    node_ids: dict[str, None] = field(default_factory=dict)  # in the order in which they came
    apart: dict[Kind, str] = field(default_factory=dict)  # kinds that don't fit -> the first field that differs

    @property
    def first(self) -> str:
        return next(iter(self.node_ids))


class Kinds:
    """The kinds of the nodes that are registered. Two kinds are compared when the second of them appears."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, Fingerprint], Kind] = {}
        self._misfits: list[Misfit] | None = []  # None: to be made again

    def join(self, hello: Hello) -> Kind:
        """Return the kind that this node is of; it counts as one of its nodes until it leaves."""
        name = (hello.role, msgspec.structs.replace(hello.fingerprint, build="", grammar=""))
        kind = self._kinds.get(name) or self._add(name)
        kind.node_ids[hello.node_id] = None
        self._misfits = None
        return kind

    def leave(self, kind: Kind, node_id: str) -> None:
        """Forget the kind with the last of its nodes."""
        kind.node_ids.pop(node_id, None)
        self._misfits = None
        if kind.node_ids:
            return
        self._kinds.pop((kind.role, kind.fingerprint), None)
        for other in kind.apart:
            other.apart.pop(kind, None)

    def _add(self, name: tuple[str, Fingerprint]) -> Kind:
        kind = Kind(*name)
        for other in self._kinds.values():
            differs = apart(kind.role, kind.fingerprint, other.role, other.fingerprint)
            if differs is not None:
                kind.apart[other] = other.apart[kind] = differs
        self._kinds[name] = kind
        return kind

    def misfits(self) -> list[Misfit]:
        """Return who can't be a pair, whichever of them prefills: of two kinds each node of the smaller one, beside
        the first of the other."""
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
    """Return a misfit with its two nodes in the order of their names."""
    first, second = sorted((node_id, other.first))
    return first, second, differs
