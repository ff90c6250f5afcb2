"""Inflight: granted requests. Final pages are described on the transfer stream and announced chunk by chunk, then the
record goes out; the pages stay pinned until the peer has answered or is gone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from prefill_node.handoff_out import HandoffOut
from shared.core.errors import HandoffFailed
from shared.core.keys import RequestKey
from shared.engine.jobs import TransferJobs
from shared.handoff.context import NodeContext
from shared.handoff.convert import prebuilt_of
from shared.kv.manager import page_count
from shared.transfer.interface import PageSender, PageSet
from shared.wire.codec import to_wire
from shared.wire.messages import Grant, Ready

READY_BYTES = 3 << 20  # most page bytes in one Ready: the peer pulls one while the next is described
RENEWALS_PER_LEASE = 4


class Inflight:
    """Owner of hand-offs from Grant to Installed."""

    def __init__(self, ctx: NodeContext, senders: Mapping[str, PageSender]) -> None:
        self._ctx = ctx
        self._senders = senders
        self._jobs: TransferJobs[tuple[HandoffOut, int], PageSet] = TransferJobs(ctx.core.engine)
        self._pages_per_ready = max(1, READY_BYTES // ctx.core.pool.page_bytes)
        self.granted: dict[RequestKey, HandoffOut] = {}

    def add(self, handoff: HandoffOut, grant: Grant, now: float) -> None:
        """HandoffFailed when the grant makes no sense."""
        page_size = self._ctx.core.kv.page_size
        sender = self._senders.get(grant.transport)
        if sender is None:
            raise HandoffFailed(f"granted for transport {grant.transport!r}, which was not offered")
        num_tokens = handoff.request.num_tokens - (handoff.record is not None)
        if grant.cached_prefix_len % page_size or grant.cached_prefix_len >= num_tokens:
            raise HandoffFailed(f"granted with {grant.cached_prefix_len} cached tokens, which can't be")
        handoff.sender, handoff.lease = sender, grant.lease
        handoff.next_page = grant.cached_prefix_len // page_size
        handoff.since = handoff.touched = now
        self.granted[handoff.key] = handoff
        self.push(handoff, now)

    def push(self, handoff: HandoffOut, now: float) -> None:
        """Describe what became final, and send the record once there is one; it need not wait for the pages."""
        self._describe_final(handoff)
        if handoff.record is not None and not handoff.record_sent:
            handoff.record_sent = True
            handoff.touched = now
            self._ctx.outbox.send(handoff.peer, prebuilt_of(handoff.record, handoff.lease))

    def _describe_final(self, handoff: HandoffOut) -> None:
        kv, sender = self._ctx.core.kv, handoff.sender
        assert sender is not None
        end = handoff.num_final_tokens // kv.page_size
        if handoff.record is not None:
            end = page_count(handoff.num_final_tokens, kv.page_size)
        while handoff.next_page < end:
            first, last = handoff.next_page, min(end, handoff.next_page + self._pages_per_ready)
            pages = kv.rows.pages_of(handoff.request.row)[first:last].copy()
            handoff.next_page = last
            handoff.num_describing += 1
            self._jobs.launch((handoff, first), partial(sender.describe, pages), f"describe({first})")

    def poll(self, now: float) -> list[tuple[RequestKey, HandoffFailed]]:
        """Announce what was described; gives the hand-offs that failed or stalled."""
        failed = []
        for done in self._jobs.take_done():
            handoff, first_page = done.tag
            handoff.num_describing -= 1
            if self.granted.get(handoff.key) is not handoff:
                continue  # ended meanwhile: its pages may have a new owner
            if done.value is None:
                failed.append((handoff.key, HandoffFailed(f"pages from {first_page} on: {done.error}")))
                continue
            page_set = done.value
            ready = page_set.ready(to_wire(handoff.key), handoff.lease, first_page)
            self._ctx.outbox.send(handoff.peer, ready, page_set.frames)
            handoff.touched = now
        return failed + self._stalled(now)

    def _stalled(self, now: float) -> list[tuple[RequestKey, HandoffFailed]]:
        """Renew leases of prompts that still wait or compute; give up a peer that has all and does not answer."""
        lease_s, failed = self._ctx.facts.lease_s, []
        for handoff in self.granted.values():
            if handoff.record_sent and not handoff.num_describing:
                if now - handoff.touched > lease_s:
                    failed.append((handoff.key, HandoffFailed(f"{handoff.peer} did not install it in {lease_s:g} s")))
            elif now - handoff.touched > lease_s / RENEWALS_PER_LEASE:
                handoff.touched = now
                self._ctx.outbox.send(handoff.peer, renewal(handoff))
        return failed


def renewal(handoff: HandoffOut) -> Ready:
    """A Ready without pages: the prefill node lives and has not forgotten."""
    return Ready(
        key=to_wire(handoff.key),
        lease=handoff.lease,
        first_page=handoff.next_page,
        pages=[],
        generations=[],
        digests=[],
        pool=None,
        inline=True,
    )
