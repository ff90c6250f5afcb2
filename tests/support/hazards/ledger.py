"""Who touched which row or page last, and whether everything before is ordered before it. One ledger per buffer.

Vectorised: a step touches thousands of pages, so all of an access is compared at once. Knows nothing of streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from tests.support.hazards.clocks import MAX_ACTORS, Clock

Ids = npt.NDArray[np.int64]


class Mode(Enum):
    READ = "read"
    WRITE = "write"
    CHECKED = "checked read"  # its result is compared with generation and digest before it is used


@dataclass(frozen=True, slots=True)
class Access:
    """`generations`: of every id, when the access was launched; `site`: index into the detector's places."""

    actor: int
    clock: Clock
    site: int
    mode: Mode
    ids: Ids
    generations: Ids


@dataclass(frozen=True, slots=True)
class Conflict:
    """`kind` says what is wrong; `other_site` is the access before, -1 when there is none to name."""

    kind: str
    ids: tuple[int, ...]
    other_site: int


class Ledger:
    """`unit` is what the ids count: row or page. Id 0 is padding: everybody may touch it at any time."""

    def __init__(self, name: str, unit: str, size: int) -> None:
        self.name, self.unit = name, unit
        self._write_actor = np.zeros(size, np.int64)
        self._write_clock = np.zeros(size, np.int64)
        self._write_site = np.full(size, -1, np.int64)
        self._write_generation = np.zeros(size, np.int64)
        shape = (MAX_ACTORS, size)
        self._read_clock, self._read_site = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        self._checked_clock, self._checked_site = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        self._checked_generation = np.zeros(shape, np.int64)
        self._newest_generation = np.zeros(size, np.int64)
        self._seen_readers: set[int] = set()
        self.num_tolerated = 0

    def access(self, access: Access) -> list[Conflict]:
        """Compare with everything before, then remember."""
        keep = access.ids != 0
        if not keep.all():
            access = Access(
                access.actor, access.clock, access.site, access.mode, access.ids[keep], access.generations[keep]
            )
        if not len(access.ids):
            return []
        found = self._behind_writes(access)
        if access.mode is Mode.WRITE:
            found += self._behind_reads(access) + self._behind_checked(access)
        if access.mode is not Mode.CHECKED:
            found += self._stale(access)
        self._remember(access)
        return found

    def _behind_writes(self, access: Access) -> list[Conflict]:
        ids = access.ids
        known = np.asarray(access.clock)[self._write_actor[ids]]
        late = self._write_clock[ids] > known
        if access.mode is Mode.CHECKED:
            same_owner = self._write_generation[ids] == access.generations
            self.num_tolerated += int((late & ~same_owner).sum())
            late &= same_owner
        return self._conflicts(f"{access.mode.value} not ordered behind a write", ids, late, self._write_site)

    def _readers(self, access: Access) -> list[tuple[int, int]]:
        """Actors that ever read here, and what the access knows of each."""
        return [(actor, access.clock[actor]) for actor in sorted(self._seen_readers)]

    def _behind_reads(self, access: Access) -> list[Conflict]:
        found: list[Conflict] = []
        for actor, known in self._readers(access):
            late = self._read_clock[actor, access.ids] > known
            found += self._conflicts("write not ordered behind a read", access.ids, late, self._read_site[actor])
        return found

    def _behind_checked(self, access: Access) -> list[Conflict]:
        """A checked read of a page whose owner changed is refused by its reader; one of the same owner is a race."""
        found: list[Conflict] = []
        for actor, known in self._readers(access):
            late = self._checked_clock[actor, access.ids] > known
            same_owner = self._checked_generation[actor, access.ids] == access.generations
            self.num_tolerated += int((late & ~same_owner).sum())
            late &= same_owner
            kind = "write not ordered behind a checked read"
            found += self._conflicts(kind, access.ids, late, self._checked_site[actor])
        return found

    def _stale(self, access: Access) -> list[Conflict]:
        late = access.generations < self._newest_generation[access.ids]
        return self._conflicts(
            f"stale {access.mode.value}: the next owner was here already", access.ids, late, self._write_site
        )

    def _conflicts(self, kind: str, ids: Ids, late: npt.NDArray[np.bool_], sites: Ids) -> list[Conflict]:
        if not late.any():
            return []
        bad = ids[late]
        return [
            Conflict(kind, tuple(int(i) for i in bad[sites[bad] == site]), int(site)) for site in np.unique(sites[bad])
        ]

    def _remember(self, access: Access) -> None:
        ids, actor, now = access.ids, access.actor, access.clock[access.actor]
        if access.mode is Mode.WRITE:
            self._write_actor[ids], self._write_clock[ids], self._write_site[ids] = actor, now, access.site
            self._write_generation[ids] = access.generations
            return self._raise_generation(access)
        self._seen_readers.add(actor)
        if access.mode is Mode.READ:
            self._read_clock[actor, ids], self._read_site[actor, ids] = now, access.site
            self._raise_generation(access)
        else:
            self._checked_clock[actor, ids], self._checked_site[actor, ids] = now, access.site
            self._checked_generation[actor, ids] = access.generations

    def _raise_generation(self, access: Access) -> None:
        np.maximum.at(self._newest_generation, access.ids, access.generations)
