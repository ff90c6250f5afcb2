"""Transfer: granted requests whose pages are being pulled.

A pull runs on the transfer stream, after the newest launched step: in that step, a page's previous owner may still
write to the page.

    Ready  ->  claim the range  (->  fetch into staging)  ->  pull into the request's own pages  ->  arrived (an input
                                                                                                    of a later tick)
"""

from __future__ import annotations

from collections.abc import Mapping

from decode_node.groups_in import GroupsIn
from decode_node.handoff_in import HandoffIn, WaitingOffer
from shared.core.errors import BatonError, HandoffFailed
from shared.core.keys import RequestKey
from shared.core.states import QueueStage
from shared.kv.layout import num_layers
from shared.node.loop.context import NodeContext
from shared.node.loop.page_copies import PageCopies
from shared.node.records.convert import draft_state_of_bytes, drafts_within
from shared.node.records.leases import Leases
from shared.node.records.page_ranges import PageRanges
from shared.transfer.interface import PageReceiver, part_bytes, part_of, require_frames
from shared.wire.codec import to_wire
from shared.wire.messages import FramesTaken, Grant, Prebuilt, Ready
from shared.wire.peers import Received


class Transfers:
    """Owns granted hand-offs."""

    def __init__(self, ctx: NodeContext, receivers: Mapping[str, PageReceiver]) -> None:
        self._ctx = ctx
        self._leases = Leases(ctx.facts.epoch)
        self._num_layers = num_layers(ctx.core.pool.planes)
        self.groups = GroupsIn(ctx, receivers)
        self.open: dict[RequestKey, HandoffIn] = {}
        self.copies: PageCopies[HandoffIn] = PageCopies(ctx, receivers, "pull")

    def add_transfer(self, waiting: WaitingOffer, cached_prefix_len: int, now: float) -> HandoffIn:
        req, core = waiting.request, self._ctx.core
        pages = core.pages_of(req.row)[: core.settings.num_pages(req.num_tokens)]
        first = cached_prefix_len // core.settings.page_size * core.kv.num_groups
        handoff = HandoffIn(
            request=req,
            source=waiting.source,
            transport=waiting.transport,
            lease=self._leases.next(),
            row=req.row,
            ranges=PageRanges(pages, first, self._num_layers),
            since=now,
            touched=now,
            source_drafts=waiting.has_drafts,
        )
        self.open[req.key] = handoff
        grant = Grant(to_wire(req.key), cached_prefix_len, handoff.lease, waiting.transport)
        if self.groups.carries(waiting.transport):
            self.groups.meet(waiting.source, waiting.transport)
        self._ctx.outbox.send(waiting.source, grant)
        return handoff

    def find(self, source: str, key: RequestKey, lease: int) -> HandoffIn | None:
        handoff = self.open.get(key)
        if handoff is not None and handoff.source == source and handoff.lease == lease:
            return handoff
        self._ctx.drop_late(source, "pages or record for an unknown lease", key)
        return None

    def ready(self, handoff: HandoffIn, received: Received, ready: Ready, now: float) -> None:
        """Pull announced pages, unless they were announced before. Raise HandoffFailed for invalid ranges or frames."""
        handoff.touched = now
        count = len(ready.pages)
        if not count:
            return
        require_frames(ready, received.frames, self._ctx.core.pool)
        if ready.inline:
            self._ctx.outbox.send(handoff.source, FramesTaken(ready.key, handoff.lease))
        if not handoff.ranges.claim(ready.first_page, count, part_of(ready, self._ctx.core.pool)):
            return
        if self.groups.carries(handoff.transport):
            self.groups.fetch(handoff, ready)
        else:
            self.copies.launch(handoff, handoff.transport, ready, received.frames)

    def prebuilt(self, handoff: HandoffIn, record: Prebuilt, now: float) -> None:
        """Keep the record. Raise HandoffFailed if the record doesn't fit the request or the vocabulary."""
        handoff.touched = now
        if handoff.record is not None:
            return
        if record.committed != handoff.request.num_tokens:
            raise HandoffFailed(f"a record of {record.committed} tokens for a request of {handoff.request.num_tokens}")
        if record.token >= self._ctx.core.spec.vocab_size:
            raise HandoffFailed("a first token beyond the vocabulary")
        state = draft_state_of_bytes(record.draft_state, self._ctx.core.future_map, peer_drafts=handoff.source_drafts)
        if not drafts_within(state, self._ctx.core.spec.vocab_size):
            raise HandoffFailed("a draft beyond the vocabulary")
        handoff.record, handoff.record_since, handoff.draft_state = record, now, state

    def poll(self, now: float) -> list[tuple[HandoffIn, BatonError]]:
        failed: list[tuple[HandoffIn, BatonError]] = []
        for fetched in self.groups.poll():
            handoff = fetched.handoff
            if self.open.get(handoff.key) is not handoff:
                continue
            handoff.touched = now
            if isinstance(fetched.staging, HandoffFailed):
                failed.append((handoff, fetched.staging))
            else:
                self.copies.launch(handoff, handoff.transport, fetched.ready, fetched.staging)
        for handoff, ready, error in self.copies.take_done():
            handoff.touched = now
            if error is not None:
                failed.append((handoff, error))
                continue
            self._count(handoff, ready)
            if handoff.ranges.complete:
                handoff.complete_since = now
                self._ctx.metrics.observe_queue(QueueStage.TRANSFER, now - handoff.since)
                pages = {"baton.pages": handoff.ranges.end - handoff.ranges.first}
                self._ctx.spans.add_span(handoff.key, "transfer", handoff.since, now, pages)
        for since in self.copies.free_held():
            self._ctx.metrics.observe("time_to_free_seconds", now - since)
        return failed

    def _count(self, handoff: HandoffIn, ready: Ready) -> None:
        core, req, ranges = self._ctx.core, handoff.request, handoff.ranges
        pool = core.pool
        part = part_of(ready, pool)
        num_whole = ranges.num_whole
        ranges.arrived(ready.first_page, len(ready.pages), part)
        if ranges.num_whole > num_whole:
            num_tokens = ranges.num_whole // core.kv.num_groups * pool.page_size
            core.scheduler.grants.granted_arrived(req, min(num_tokens, req.num_tokens))
        self._ctx.metrics.count("handoff_bytes", len(ready.pages) * part_bytes(part, pool))

    def stalled(self, now: float) -> list[tuple[HandoffIn, BatonError]]:
        lease_s = self._ctx.facts.lease_s
        return [
            (handoff, HandoffFailed(f"{handoff.source} was silent about it for {lease_s:g} s"))
            for handoff in self.open.values()
            if not handoff.num_pulling and now - handoff.touched > lease_s
        ]

    def revoked(self, key: RequestKey, row: int, now: float) -> HandoffIn | None:
        """Forget the hand-off. `row` becomes free when no pull writes to its pages."""
        handoff = self.open.pop(key, None)
        if handoff is None:
            self._ctx.core.queues.budget.release_held(row)
            return None
        self.groups.forget(handoff)
        self.copies.end(handoff, now)
        return handoff

    def of_source(self, source: str) -> list[HandoffIn]:
        return [handoff for handoff in self.open.values() if handoff.source == source]
