"""Pages that leave a node, of hand-offs and of loans: in order, and only as fast as each peer reads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from prefill_node.send_queue import Sending, SendQueue
from prefill_node.unread import Unread
from shared.core.errors import HandoffFailed
from shared.device.cpu import do_nothing
from shared.kv.layout import PlaneSpec
from shared.node.loop.context import NodeContext
from shared.observe.step_records import StepRecords
from shared.transfer.interface import WHOLE, PageList, PageSender, PageSet, Part
from tests.support.cores.hand_driven import HandDriven

PAGE_BYTES = 1 << 20
PLANES = (PlaneSpec("kv", (PAGE_BYTES,), torch.uint8),)


class Sender:
    name, num_blocks = "zmq", 0

    def __init__(self, is_inline: bool = True) -> None:
        self.is_inline, self.error = is_inline, None

    def describe(self, pages: PageList, part: Part = WHOLE) -> PageSet:
        if self.error is not None:
            raise self.error
        return PageSet([int(page) for page in pages], [], [], part=part)


@dataclass(eq=False)
class Sent:
    key: str
    peer: str
    sending: Sending


class Rig:
    def __init__(self, is_inline: bool = True) -> None:
        self.stream, self.open, self.sender = HandDriven(), dict[str, Sent](), Sender(is_inline)
        streams = SimpleNamespace(transfer=self.stream)
        engine = SimpleNamespace(streams=streams, last_done=None, heard=lambda error: None, records=StepRecords())
        core = SimpleNamespace(engine=engine, pool=SimpleNamespace(planes=PLANES, num_parts=1))
        ctx = cast(NodeContext, SimpleNamespace(core=core))
        self.queue: SendQueue[Sent] = SendQueue(ctx, Unread(do_nothing), self.open, lambda sent: sent.key)

    def begin(self, key: str, peer: str = "d0@1") -> Sent:
        sent = self.open[key] = Sent(key, peer, Sending(1, cast(PageSender, self.sender)))
        return sent

    def done(self) -> list[tuple[str, int, int]]:
        """(of whom, first page, number of pages)"""
        done = list(self.queue.take_done())
        return [(one.sent.key, one.first, len(one.page_set.pages)) for one in done if one.page_set is not None]


def pages(count: int) -> PageList:
    return np.arange(1, count + 1, dtype=np.int32)


def test_pages_are_described_in_sets_that_fit_a_message() -> None:
    rig = Rig(is_inline=False)
    one = rig.begin("a")
    rig.queue.add_pages(one, 4, pages(7))
    assert rig.queue.launch() == [one] * 3 and one.sending.num_describing == 3 and not len(rig.queue)
    assert rig.done() == [("a", 4, 3), ("a", 7, 3), ("a", 10, 1)] and one.sending.num_describing == 0


def test_pages_that_cannot_be_described_return_the_error() -> None:
    rig = Rig()
    rig.sender.error = HandoffFailed("the pool is gone")
    rig.queue.add_pages(rig.begin("a"), 2, pages(1))
    rig.queue.launch()
    (done,) = rig.queue.take_done()
    assert done.page_set is None and done.first == 2 and "the pool is gone" in str(done.error)


def test_who_takes_more_than_was_sent_takes_nothing() -> None:
    sending = Sending(1, cast(PageSender, Sender()))
    sending.untaken.extend([5, 6])
    assert [sending.take_oldest() for _ in range(3)] == [True, True, False]
