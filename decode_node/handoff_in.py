"""One request on its way here from a prefill node, as the decode node sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from decode_node.page_ranges import PageRanges
from shared.core.errors import BatonError, HandoffFailed
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.wire.messages import Offer, Prebuilt


@dataclass(slots=True, eq=False)
class WaitingOffer:
    """In prealloc: no memory yet."""

    request: Request
    source: str  # the prefill node's link name
    offer: Offer
    transport: str
    since: float
    is_vouched: bool  # its router stands behind it


@dataclass(slots=True, eq=False)
class HandoffIn:
    """Granted: row and pages are reserved, pulls may be writing into them. `row` outlives a revoked grant, for the
    row is held until the last pull is over."""

    request: Request
    source: str
    transport: str
    lease: int
    row: int
    ranges: PageRanges
    since: float
    touched: float
    source_drafts: bool  # the source has a draft head too, so pages and record bring draft state
    num_pulling: int = 0
    num_fetching: int = 0  # announced, and not yet in a staging buffer of ours
    record: Prebuilt | None = None
    record_since: float = 0.0  # the source sends it when the last chunk is computed
    draft_state: dict[str, torch.Tensor] = field(default_factory=dict)  # the record's, host
    complete_since: float = 0.0
    # What the source hears when it is over without being installed
    failure: BatonError = field(default_factory=lambda: HandoffFailed("the decode node gave it up"))

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def needs_source(self) -> bool:
        """Whether something that only the source has is missing still."""
        return self.record is None or not self.ranges.all_claimed or self.num_fetching > 0

    @property
    def complete(self) -> bool:
        return self.record is not None and self.ranges.complete
