"""Inflight: granted requests. The transfer stream describes their pages (by digests or frames), and the node announces
them.

A step's first layers are sent while the step computes later ones. Pages stay pinned until the peer answers or is gone.

    step     | layers 0..4 | 5..9 | ... | 25..29, sampling |
    describe               | 0..4 | 5..9 | ...             | 25.. to the end of the page |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from prefill_node.handoff_out import HandoffOut
from prefill_node.send_queue import Sending, SendQueue
from prefill_node.unread import Unread
from shared.core.errors import HandoffFailed
from shared.core.keys import RequestKey
from shared.model.math.interface import LayerMarks
from shared.node.loop.context import NodeContext
from shared.node.records.convert import prebuilt_of
from shared.sched.steps.events import ChunkLaunched
from shared.transfer.interface import WHOLE, PageList, PageSender, Part
from shared.wire.codec import to_wire
from shared.wire.messages import Grant, Ready

RENEWALS_PER_LEASE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Computing:
    handoff: HandoffOut
    first: int
    pages: PageList
    layers: LayerMarks
    waits_for: int = 0  # index in layers.events: the event that these pages wait for


class Inflight:
    """Owns hand-offs from Grant to Installed."""

    def __init__(self, ctx: NodeContext, senders: Mapping[str, PageSender], unread: Unread) -> None:
        self._ctx = ctx
        self._senders = senders
        self._computing: list[Computing] = []
        self.granted: dict[RequestKey, HandoffOut] = {}
        self.queue: SendQueue[HandoffOut] = SendQueue(ctx, unread, self.granted, lambda handoff: handoff.key)

    def add_handoff(self, handoff: HandoffOut, grant: Grant, now: float) -> None:
        """Start the transfer. Raise HandoffFailed for an impossible grant."""
        page_size = self._ctx.core.settings.page_size
        sender = self._senders.get(grant.transport)
        if sender is None:
            raise HandoffFailed(f"granted for transport {grant.transport!r}, which was not offered")
        num_tokens = handoff.num_tokens
        if grant.cached_prefix_len % page_size or grant.cached_prefix_len >= num_tokens:
            raise HandoffFailed(f"granted with an impossible {grant.cached_prefix_len} cached tokens")
        handoff.grant = Sending(grant.lease, sender)
        kv = self._ctx.core.kv
        handoff.next_page = grant.cached_prefix_len // page_size * kv.num_groups
        handoff.since = handoff.touched = now
        self.granted[handoff.key] = handoff
        for event in handoff.launched:
            if event.num_tokens > handoff.num_final_tokens:
                self.launched(handoff, event)
        handoff.launched.clear()
        self.push(handoff, now)

    def push(self, handoff: HandoffOut, now: float) -> None:
        """Describe final pages. Send the record, if any, without waiting for the pages."""
        self._describe_computed()
        self._describe_final(handoff)
        self._launch_waiting(now)
        if handoff.record is not None and not handoff.record_sent:
            handoff.record_sent = True
            handoff.touched = now
            self._ctx.outbox.send(handoff.peer, prebuilt_of(handoff.record, handoff.sending.lease))

    def _describe_final(self, handoff: HandoffOut) -> None:
        end = self._list_end(handoff.num_final_tokens, is_last=handoff.record is not None)
        ahead = min(end, handoff.layers_end)
        ends = self._ctx.core.settings.layer_ends
        for stop, part in ((ahead, Part(ends[-1]) if ends else WHOLE), (end, WHOLE)):
            if handoff.next_page < stop:
                pages = self._pages(handoff, handoff.next_page, stop)
                self.queue.add_pages(handoff, handoff.next_page, pages, part)
                handoff.next_page = stop

    def _list_end(self, num_tokens: int, *, is_last: bool) -> int:
        """Return where the page list of `num_tokens` tokens ends. A page that is not full comes last."""
        settings, kv = self._ctx.core.settings, self._ctx.core.kv
        return settings.num_pages(num_tokens) if is_last else num_tokens // kv.page_size * kv.num_groups

    def _pages(self, handoff: HandoffOut, first: int, end: int) -> PageList:
        """Return entries [first, end) of the row's page list, with 0 for pages that the decode node never reads."""
        kv = self._ctx.core.kv
        own = kv.rows.pages_of(handoff.request.row)[first:end]
        entries = kv.entries(first, first + len(own), kv.cache.first_needed(handoff.num_tokens)) - first
        pages = np.zeros_like(own)
        pages[entries] = own[entries]
        return pages

    def _launch_waiting(self, now: float) -> None:
        for handoff in self.queue.launch():
            handoff.touched = now

    def taken(self, handoff: HandoffOut, now: float) -> None:
        if handoff.sending.take_oldest():
            handoff.touched = now

    # ---- layers sent while later layers are computed

    def launched(self, handoff: HandoffOut, event: ChunkLaunched) -> None:
        """Start to send the pages up to this chunk's end, layer by layer."""
        end = self._list_end(event.num_tokens, is_last=event.is_last)
        first = max(handoff.next_page, handoff.layers_end)
        if first >= end:
            return
        handoff.layers_end = end
        pages = self._pages(handoff, first, end)
        self._computing.append(Computing(handoff, first, pages, event.layers))
        for mark in event.layers.events:
            mark.add_callback(lambda _: self._ctx.wake())

    def _describe_computed(self) -> None:
        self._computing = [left for entry in self._computing if (left := self._advance(entry)) is not None]

    def _advance(self, entry: Computing) -> Computing | None:
        marks, index = entry.layers, entry.waits_for
        while index < len(marks.ends) and marks.events[index].query():
            if self.granted.get(entry.handoff.key) is not entry.handoff or marks.events[index].error is not None:
                return None  # the hand-off has ended, or its failed step will end it
            before = marks.ends[index - 1] if index else 0
            self.queue.add_pages(entry.handoff, entry.first, entry.pages, Part(before, marks.ends[index] - before))
            index += 1
        return replace(entry, waits_for=index) if index < len(marks.ends) else None

    def poll(self, now: float) -> list[tuple[RequestKey, HandoffFailed]]:
        self._describe_computed()
        failed = []
        for done in self.queue.take_done():
            handoff = done.sent
            if done.page_set is None:
                failed.append((handoff.key, HandoffFailed(f"pages from {done.first} on: {done.error}")))
                continue
            ready = done.page_set.ready(to_wire(handoff.key), handoff.sending.lease, done.first)
            self._ctx.outbox.send(handoff.peer, ready, done.page_set.frames)
            handoff.touched = now
        self._launch_waiting(now)
        return failed + self._stalled(now)

    def _stalled(self, now: float) -> list[tuple[RequestKey, HandoffFailed]]:
        """Renew the leases of unfinished prompts. Return hand-offs whose record got no answer within `lease_s`."""
        lease_s, failed = self._ctx.facts.lease_s, []
        for handoff in self.granted.values():
            if handoff.record_sent and not handoff.sending.num_describing:
                if now - handoff.touched > lease_s:
                    failed.append((handoff.key, HandoffFailed(f"{handoff.peer} did not install it in {lease_s:g} s")))
            elif now - handoff.touched > lease_s / RENEWALS_PER_LEASE:
                handoff.touched = now
                self._ctx.outbox.send(handoff.peer, renewal(handoff))
        return failed


def renewal(handoff: HandoffOut) -> Ready:
    """Return a Ready that has no pages, and only renews the lease."""
    return Ready(
        key=to_wire(handoff.key),
        lease=handoff.sending.lease,
        first_page=handoff.next_page,
        pages=[],
        generations=[],
        digests=[],
        pool=None,
        inline=True,
        first_layer=0,
        num_layers=0,
        handle=b"",
        staged_bytes=0,
    )
