"""Grammar masks of a step: made on the host while the step's forward runs, and waited for by its sampling alone.

    host      | result(N-1) ... masks(N)  |
    forward   | forward(N)                | sample(N) |

The host can make the masks of step N once it has processed the results of all steps before it and, where the step
verifies drafts, has seen them. So the oldest open step can always be served, and nobody may wait for a younger one.
Knows nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.device.events import Event
from shared.engine.verify import Drafts
from shared.sample.interface import TokenMasks


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """Drafts of D decode rows on the host: ids and parents (D, width - 1); see Drafts for what a parent is."""

    ids: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int64]


def named_drafts(drafts: Drafts) -> dict[str, torch.Tensor]:
    """What of a window's drafts the host wants."""
    found = {"ids": drafts.ids}
    return found if drafts.parents is None else found | {"parents": drafts.parents}


def read_drafts(found: Mapping[str, torch.Tensor]) -> HostDrafts:
    """Of `named_drafts`, on the host; of a chain each draft follows the one before it."""
    ids = found["ids"].numpy()
    if "parents" in found:
        return HostDrafts(ids, found["parents"].numpy())
    return HostDrafts(ids, np.broadcast_to(np.arange(ids.shape[1]), ids.shape))


@dataclass(slots=True, eq=False)
class StepMasks:
    """Owned by the step's lease. `ready` is fired by the host; the step's sampling waits for it."""

    ready: Event
    value: TokenMasks | None = None

    @property
    def is_made(self) -> bool:
        return self.ready.fired

    def put(self, value: TokenMasks | None) -> None:
        """Let the step sample. None: it has failed already, and samples nothing."""
        self.value = value
        self.ready.fire()
