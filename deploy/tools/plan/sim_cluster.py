"""Simulate a cluster in virtual time: the load test's driver, the router's placement, and timed nodes.

Prompts are the model's tokens, so prefix caches hit as in a real cluster. Nodes never fail.

    driver --due--> place --to_node--> prefill node --last chunk--> hand-off --> decode node --> records
                                  `--> decode node alone (short prompt, or no prefill node)
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import Profile, StepShape
from deploy.tools.plan.timed_node import TimedNode, VirtualClock
from deploy.tools.plan.tokens import SimTokens
from deploy.tools.traffic.figures.record import UNFINISHED, RequestRecord
from deploy.tools.traffic.workloads.driver import Driver, LoadRequest
from router.fleet.registry import RegisteredNode, Registry
from router.policy.interface import Wanted
from router.policy.least_load import LeastLoad
from router.policy.placement import Placer
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request, RequestState, TokenIds
from shared.core.sampling_params import SamplingParams
from shared.sched.scheduler import make_scheduler
from shared.sched.steps.events import ChunkReady, Emitted, Ended, GrantRevoked, HandoffUnpinned, PrefillDone, SchedEvent
from shared.sched.steps.prebuilt import Arrival
from shared.sched.steps.settings import SchedSettings
from shared.wire.messages import Fingerprint, Hello

EQUAL = Fingerprint(  # equal for all nodes, so any two can pair
    0, 0, "", "", "", 1, "", "", "", ""
)
PINNED_FRACTION = 0.5  # MemoryConfig's default


@dataclass(slots=True, eq=False)
class Handoff:
    """A hand-off from the prefill node `giver` to the decode node `taker`. `source`: the request on `giver`. `target`:
    its copy on `taker`."""

    source: Request
    target: Request
    giver: SimNode
    taker: SimNode
    is_granted: bool = False
    num_final: int = 0  # prompt tokens whose pages are ready
    num_pulled: int = 0
    done: PrefillDone | None = None


@dataclass(slots=True, eq=False)
class SimNode:
    node: RegisteredNode
    timed: TimedNode
    # hand-offs to this decode node that wait for a grant, in order of arrival
    offers: list[Handoff] = field(default_factory=list)
    wakes_at: float = float("inf")


@dataclass(slots=True, eq=False)
class Open:
    asked: LoadRequest
    record: RequestRecord
    nodes: tuple[SimNode, ...]  # the prefilling and the decoding node
    handoff: Handoff | None = None
    waits_for_prefill: bool = True


def is_news(event: SchedEvent) -> bool:
    """Return whether the node may have more to do now.

    `HandoffUnpinned` does not count. If the freed pages are too few for the waiting request, the node would admit and
    unpin the hand-off again and again.
    """
    return not isinstance(event, HandoffUnpinned)


class SimCluster:
    def __init__(self, layout: ClusterLayout, profile: Profile, tokens: SimTokens) -> None:
        self._layout, self._profile, self._tokens = layout, profile, tokens
        self._path = profile.path(layout.cores)
        self._clock = VirtualClock()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._registry = Registry(silence_s=float("inf"))
        self._placer = Placer(self._registry, LeastLoad(), layout.local_tokens)
        self.nodes = [
            self._make_node(role, number, f"{role}-{number}")
            for number, role in enumerate(["prefill"] * layout.prefill + ["decode"] * layout.decode)
        ]
        self._by_id = {node.node.node_id: node for node in self.nodes}
        self._open: dict[RequestKey, Open] = {}
        self._records: list[RequestRecord] = []
        self._arrival = itertools.count()
        self._asks_at: float | None = None

    def _make_node(self, role: str, number: int, name: str, life: int = 1) -> SimNode:
        layout, profile = self._layout, self._profile
        settings = SchedSettings(
            page_size=profile.page_size,
            max_context=profile.max_context,
            chunk_size=layout.chunk_size,
            mixed_chunk_size=layout.mixed_chunk_size,
            max_ungranted_pages=max(1, int(PINNED_FRACTION * profile.num_pages)),
            growth_reserve=profile.growth_reserve,
        )
        hello = Hello(role, name, life, "", EQUAL, profile.max_context, profile.max_running, "", [], 1, [])
        node, _ = self._registry.hello(name, hello, self._clock.now)
        assert node is not None
        scheduler = make_scheduler(settings, profile.num_pages, profile.max_running)
        answer_id = self._tokens.answer_id
        timed = TimedNode(self._clock, scheduler, self._seconds_of(number), lambda key, position: answer_id(position))
        return SimNode(node, timed)

    def _seconds_of(self, number: int) -> Callable[[StepShape, float], float]:
        """Return a function that maps a step's shape and begin to its seconds."""
        costs, path = self._profile.node(self._layout.cores), self._path
        first = number // self._layout.per_host * self._layout.per_host

        def seconds(shape: StepShape, begin: float) -> float:
            machine = range(first, min(first + self._layout.per_host, len(self.nodes)))
            is_beside = any(self.nodes[i].timed.busy_until >= begin for i in machine if i != number)
            step = (costs.beside if is_beside and costs.beside else costs.alone).seconds(shape)
            return step * (path.prompt_stretch if shape.pairs else path.decode_stretch)

        return seconds

    # ---- time

    @property
    def now(self) -> float:
        return self._clock.now

    def play(
        self, driver: Driver, until: float, passes: Callable[[float], None] = lambda now: None
    ) -> list[RequestRecord]:
        """Return the records of the driver's requests. Requests that are open at `until` fail.

        After each event, call `passes` with the virtual time.
        """
        self._driver = driver
        self._take_due()
        while self._agenda and self._agenda[0][0] <= until:
            self._clock.now, _, action = heapq.heappop(self._agenda)
            action()
            self._take_due()
            passes(self._clock.now)
        for record in self._records:
            if math.isnan(record.end):
                record.error = UNFINISHED
        return self._records

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), action))

    def _take_due(self) -> None:
        for asked in self._driver.take_requests(self._clock.now):
            self._ask(asked)
        next_at = self._driver.next_at()
        if next_at is not None and next_at != self._asks_at:
            self._asks_at = next_at
            self._at(next_at, lambda: None)

    def _wake(self, node: SimNode) -> None:
        at = node.timed.next_at()
        if at is not None and at < node.wakes_at:
            node.wakes_at = at
            self._at(at, lambda: self._run_node(node, at))

    def _run_node(self, node: SimNode, planned: float) -> None:
        if node.wakes_at == planned:
            node.wakes_at = float("inf")
            self._turn(node)

    # ---- a request's way

    def _ask(self, asked: LoadRequest) -> None:
        record = RequestRecord(asked.number, asked.session, asked.turn, asked.due, asked.max_tokens, asked.probe)
        record.sent = self._clock.now
        self._records.append(record)
        self._at(self._clock.now + self._path.to_node, lambda: self._dispatch(asked, record))

    def _dispatch(self, asked: LoadRequest, record: RequestRecord) -> None:
        ids = self._tokens.prompt(asked.messages)
        record.prompt_tokens, record.status = len(ids), 200
        most = self._profile.max_context
        if len(ids) + asked.max_tokens > most:
            record.status, record.end = 400, self._clock.now
            record.error = f"prompt and answer are longer than the context of {most:,} tokens"
            self._driver.ended(asked.number, "", self._clock.now, may_go_on=False)
            return
        placed = self._placer.place(Wanted(len(ids), self._clock.now))
        prefill = self._by_id[placed.prefill.node_id] if placed.prefill else None
        decode = self._by_id[placed.decode.node_id] if placed.decode else None
        runner = decode or prefill
        assert runner is not None
        key = RequestKey("plan", 1, str(asked.number), 0, 0)
        open_ = self._open[key] = Open(asked, record, (prefill or runner, runner))
        self._occupy(open_, len(ids))
        req = self._request(key, asked, ids)
        if prefill is not None and decode is not None:
            req.handoff_to = decode.node.node_id
            open_.handoff = Handoff(req, self._request(key, asked, ids), prefill, decode)
            decode.offers.append(open_.handoff)
            prefill.timed.submit(req)
            self._turn(decode)
            self._turn(prefill)
        else:
            runner.timed.submit(req)
            self._turn(runner)

    def _request(self, key: RequestKey, asked: LoadRequest, ids: TokenIds) -> Request:
        sampling = SamplingParams(max_tokens=asked.max_tokens, temperature=0.0)
        return Request(key, NodeAsk(ids, sampling, 0), arrival=next(self._arrival))

    def _occupy(self, open_: Open, num_tokens: int) -> None:
        """Do the same as `Attempt.occupy`, for the policies."""
        prefiller, runner = open_.nodes
        prefiller.node.ours.open_prompt_tokens += num_tokens
        prefiller.node.ours.open_prompt_work += num_tokens
        runner.node.ours.open_sequences += 1
        for node in dict.fromkeys(open_.nodes):
            node.node.ours.dispatched += 1

    def _prompt_done(self, open_: Open) -> None:
        if open_.waits_for_prefill:
            open_.waits_for_prefill = False
            open_.nodes[0].node.ours.open_prompt_tokens -= open_.record.prompt_tokens
            open_.nodes[0].node.ours.open_prompt_work -= open_.record.prompt_tokens

    # ---- a node's turn

    def _turn(self, node: SimNode) -> None:
        timed = node.timed
        timed.turn()
        events = timed.scheduler.queues.take_events()
        while any(map(is_news, events)) or self._grant(node):
            for event in events:
                self._event(node, event)
            timed.turn()
            events = timed.scheduler.queues.take_events()
        for event in events:
            self._event(node, event)
        self._wake(node)

    def _grant(self, node: SimNode) -> bool:
        """Grant memory like decode_node.prealloc: in order of arrival, until a request gets none."""
        queues = node.timed.scheduler.queues
        queues.oldest_offer = None
        num_granted = 0
        for handoff in list(node.offers):
            req = handoff.target
            older_waits = bool(queues.waiting) and queues.waiting[0].arrival < req.arrival
            if older_waits or node.timed.grant(req) is None:
                queues.oldest_offer = req.arrival
                break
            node.offers.remove(handoff)
            handoff.is_granted = True
            handoff.giver.timed.scheduler.queues.set_granted(handoff.source.key)
            self._at(self._clock.now, functools.partial(self._turn, handoff.giver))  # `giver` may now pin more
            num_granted += 1
            self._pull(handoff.source.key, handoff.num_final)
            if handoff.done is not None:
                self._move(handoff, len(handoff.source.ask.prompt_ids))
        return num_granted > 0

    def _event(self, node: SimNode, event: SchedEvent) -> None:
        if isinstance(event, Emitted):
            self._emitted(event)
        elif isinstance(event, Ended):
            self._request_ended(node, event)
        elif isinstance(event, ChunkReady):
            self._pull(event.request.key, event.num_tokens)
        elif isinstance(event, PrefillDone):
            self._pull(event.request.key, event.committed)
            self._prefilled(event)
        elif isinstance(event, GrantRevoked):
            self._revoked(node, event)
        elif isinstance(event, HandoffUnpinned):
            handoff = self._handoff(event.request.key)
            if handoff is not None:
                handoff.done = None

    def _handoff(self, key: RequestKey) -> Handoff | None:
        open_ = self._open.get(key)
        return open_.handoff if open_ else None

    def _emitted(self, event: Emitted) -> None:
        """Both nodes of a hand-off report its first token. The earlier report counts."""
        open_ = self._open.get(event.key)
        if open_ is None or event.first_pos != len(open_.record.at):
            return
        self._prompt_done(open_)
        open_.record.token(self._clock.now, 0.0, 1)

    def _prefilled(self, event: PrefillDone) -> None:
        handoff = self._handoff(event.request.key)
        if handoff is None:
            return
        handoff.done = event
        if handoff.is_granted:  # only the last chunk's pages are left to pull
            last = (event.committed - 1) % self._layout.chunk_size + 1
            self._move(handoff, last)

    def _pull(self, key: RequestKey, num_final: int) -> None:
        """Charge the decode node's cores for copying and checking ready pages."""
        handoff = self._handoff(key)
        if handoff is None:
            return
        handoff.num_final = max(handoff.num_final, num_final)
        if handoff.is_granted:
            handoff.taker.timed.owe(self._copy_seconds(handoff.num_final - handoff.num_pulled))
            handoff.num_pulled = handoff.num_final

    def _copy_seconds(self, num_tokens: int) -> float:
        return num_tokens / self._profile.page_size * self._profile.page_bytes / self._path.bytes_per_s

    def _move(self, handoff: Handoff, num_tokens: int) -> None:
        """Start a pull after the decode node's newest launched step."""
        begin = max(self._clock.now, handoff.taker.timed.busy_until)
        self._at(begin + self._path.handoff + self._copy_seconds(num_tokens), lambda: self._install(handoff))

    def _install(self, handoff: Handoff) -> None:
        done, key = handoff.done, handoff.source.key
        if done is None or handoff.target.state is not RequestState.GRANTED:
            return
        handoff.taker.timed.admit(Arrival(handoff.target, done.token, done.committed, (), {}))
        self._forget_handoff(key)
        self._turn(handoff.taker)

    def _forget_handoff(self, key: RequestKey) -> None:
        """Move the prefill node's pages to its prefix cache."""
        open_ = self._open.get(key)
        if open_ is not None and open_.handoff is not None:
            giver, open_.handoff = open_.handoff.giver, None
            giver.timed.scheduler.queues.complete_handoff(key)
            giver.timed.forget(key)
            self._turn(giver)

    def _revoked(self, node: SimNode, event: GrantRevoked) -> None:
        """Free the pages. The decode node itself prefills a retracted request."""
        node.timed.scheduler.queues.budget.release_held(event.row)
        if event.retracted:
            self._forget_handoff(event.request.key)

    def _request_ended(self, node: SimNode, event: Ended) -> None:
        open_ = self._open.get(event.key)
        node.timed.forget(event.key)
        if open_ is None or node not in open_.nodes:
            return
        del self._open[event.key]
        self._prompt_done(open_)
        open_.nodes[1].node.ours.open_sequences -= 1
        record, handoff = open_.record, open_.handoff
        if handoff is not None:  # the request ended with its first token, or could not run
            handoff.taker.offers = [other for other in handoff.taker.offers if other is not handoff]
            for side in (handoff.giver, handoff.taker):
                if side is not node:
                    side.timed.forget(event.key)
                    side.timed.scheduler.queues.abort(event.key)
                    self._turn(side)
        record.end, record.finish_reason = self._clock.now, event.reason.value
        record.error = event.error.message if event.error is not None else ""
        record.reported_tokens, record.cached_tokens = event.num_output_tokens, event.cached_tokens
        answer = self._tokens.answer(event.num_output_tokens)
        self._driver.ended(open_.asked.number, answer, self._clock.now, may_go_on=record.is_whole)
