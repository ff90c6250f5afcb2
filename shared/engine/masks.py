"""Hold a step's grammar masks. Only the sampling waits for them.

    host      | result(N-1) ... masks(N)  |
    forward   | forward(N)                | sample(N) |

For step N's masks the host needs only earlier results and step N's drafts. So no step waits for a later step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.device.events import Event, Ticket
from shared.engine.boundary import Boundary, HostCopy, Packed, SlotHolder
from shared.engine.verify import Drafts
from shared.sample.interface import TokenMasks


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """Drafts on the host. Both arrays are (D, width - 1), as in Drafts."""

    ids: npt.NDArray[np.int64]
    parents: npt.NDArray[np.int64]


def named_drafts(drafts: Drafts) -> dict[str, torch.Tensor]:
    found = {"ids": drafts.ids}
    return found if drafts.parents is None else found | {"parents": drafts.parents}


def read_drafts(found: Mapping[str, torch.Tensor]) -> HostDrafts:
    """Return the drafts from a host copy of `named_drafts`.

    In a chain, each draft's parent is the draft before it.
    """
    ids = found["ids"].numpy()
    if "parents" in found:
        return HostDrafts(ids, found["parents"].numpy())
    return HostDrafts(ids, np.broadcast_to(np.arange(ids.shape[1]), ids.shape))


@dataclass(slots=True, eq=False)
class StepDrafts:
    """The drafts of a step with masks, on their way to the host. `made` fires once they are packed."""

    made: Event
    packed: Packed | None = None  # on the device; kept until the lease ends, because a copy to the host reads it
    copy: Ticket[HostCopy | None] | None = None

    def pack(self, drafts: Drafts, boundary: Boundary) -> None:
        """On the forward stream."""
        self.packed = boundary.pack(named_drafts(drafts))
        self.made.fire()

    def download(self, boundary: Boundary, lease: SlotHolder) -> HostCopy | None:
        """Begin to copy the drafts to the host, on the copy stream. Return None if drafting failed."""
        return None if self.packed is None else boundary.download(self.packed, lease)

    def on_host(self) -> HostDrafts | None:
        """Return the drafts, or None if `copy` failed. Call this once `copy` is done."""
        ticket = self.copy
        if ticket is None or ticket.result is None or ticket.done.error is not None:
            return None
        return read_drafts(ticket.result.read())


@dataclass(slots=True, eq=False)
class StepMasks:
    """One step's masks, owned by its lease. The host fires `ready`; the sampling waits for it."""

    ready: Event
    value: TokenMasks | None = None

    @property
    def is_made(self) -> bool:
        return self.ready.fired

    def put(self, value: TokenMasks | None) -> None:
        """Let the step sample. `value` is None if the step has failed and samples nothing."""
        self.value = value
        self.ready.fire()
