"""Wait for what a node's links receive."""

from __future__ import annotations

import time

from shared.wire.peers import Received
from shared.wire.zeromq.link import NodeLinks
from tests.support.machine.patience import HANG_GUARD_S


def next_message(links: NodeLinks) -> Received:
    end = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < end:
        for inbound in links.poll(0.05):
            if isinstance(inbound, Received):
                return inbound
    raise AssertionError("no message came")
