"""One incoming hand-off, as the decode node records it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shared.core.errors import BatonError, HandoffFailed
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.node.records.page_ranges import PageRanges
from shared.wire.fitting import NO_DRAFT_STATE
from shared.wire.messages import Offer, Prebuilt


@dataclass(slots=True, eq=False)
class WaitingOffer:
    request: Request
    source: str  # the prefill node's link name
    offer: Offer
    transport: str
    since: float
    is_vouched: bool

    @property
    def has_drafts(self) -> bool:
        """Whether the source's pages and record contain draft state."""
        return self.offer.fingerprint.spec != NO_DRAFT_STATE


@dataclass(slots=True, eq=False)
class HandoffIn:
    """A granted hand-off. If its grant is revoked, `row` stays reserved until the last pull has ended."""

    request: Request
    source: str
    transport: str
    lease: int
    row: int
    ranges: PageRanges
    since: float
    touched: float
    source_drafts: bool  # the source's pages and record contain draft state
    num_pulling: int = 0
    num_fetching: int = 0  # announced page sets that are not staged here yet
    record: Prebuilt | None = None
    record_since: float = 0.0
    draft_state: dict[str, torch.Tensor] = field(default_factory=dict)  # the record's draft tensors, on the host
    complete_since: float = 0.0
    # the source gets this error if the hand-off ends before its installation
    failure: BatonError = field(default_factory=lambda: HandoffFailed("the decode node ended it"))

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def needs_source(self) -> bool:
        return self.record is None or not self.ranges.all_claimed or self.num_fetching > 0

    @property
    def complete(self) -> bool:
        return self.record is not None and self.ranges.complete
