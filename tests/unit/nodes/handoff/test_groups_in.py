"""What a decode node keeps of pages that are to come through process groups: nothing of hand-offs that are over."""

from __future__ import annotations

import numpy as np

from decode_node.handoff_in import HandoffIn
from decode_node.side import DecodeSide
from shared.core.sampling_params import SamplingParams
from shared.node.records.page_ranges import PageRanges
from shared.wire.peers import peer_name
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.node_pair import make_node


def handoff_of(source: str) -> HandoffIn:
    request = Job(1, (1, 2, 3), SamplingParams(max_tokens=4), 7).request()
    return HandoffIn(request, source, "gloo", 1, 1, PageRanges(np.ones(1, np.int32), 0), 0.0, 0.0, False)


def test_a_revoked_hand_off_leaves_nothing_behind() -> None:
    """A prefill node has another name in each of its lives: each left a key behind with its first revoked hand-off."""
    side = make_node("decode", "d0", CoreKnobs()).side
    assert isinstance(side, DecodeSide)
    for life in range(1, 100):
        side.transfers.groups.forget(handoff_of(peer_name("p0", life)))
    assert not side.transfers.groups._waiting
