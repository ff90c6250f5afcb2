"""A load in virtual time: the real driver against a scripted server, records as the client would have written them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.workloads.driver import Driver, LoadRequest
from deploy.tools.traffic.workloads.workload import Session, Turn


@dataclass(frozen=True, slots=True)
class Script:
    """How the server answers one request. `tokens` None: as many as it was asked for."""

    ttft: float = 0.1
    itl: float = 0.01
    tokens: int | None = None
    error: str = ""


def always(script: Script) -> Callable[[LoadRequest], Script]:
    return lambda request: script


def answer(request: LoadRequest, script: Script, now: float) -> RequestRecord:
    """`now`: when it was sent."""
    record = RequestRecord(
        request.number, request.session, request.turn, request.due, request.max_tokens, request.probe, sent=now
    )
    if script.error:
        record.error, record.end = script.error, now + script.ttft
        return record
    count = script.tokens or request.max_tokens
    if request.hang_up_after is not None and request.hang_up_after < count:
        count, record.hung_up = request.hang_up_after, True
    for position in range(count):
        record.token(now + script.ttft + position * script.itl, 0.0, 1)
    record.end = record.at[-1] if count else now
    return record


def play(driver: Driver, script: Callable[[LoadRequest], Script], most: int = 10_000) -> list[RequestRecord]:
    """All records, by number. Time goes from event to event."""
    records: list[RequestRecord] = []
    ends: list[tuple[float, int, str]] = []
    while not driver.is_done and len(records) < most:
        now = min(at for at in (driver.next_at(), ends[0][0] if ends else None) if at is not None)
        while ends and ends[0][0] <= now:
            end, number, text = heapq.heappop(ends)
            record = records[number]
            driver.ended(number, text, end, may_go_on=record.is_whole)
        for request in driver.take_requests(now):
            records.append(answer(request, script(request), now))
            heapq.heappush(ends, (records[-1].end, request.number, f"answer {request.number}"))
    return records


def single_turns(max_tokens: int = 4) -> Iterator[Session]:
    number = 0
    while True:
        yield Session((Turn(f"prompt {number}", max_tokens),))
        number += 1


def talks(lengths: Sequence[int], think_s: float = 0.0) -> Iterator[Session]:
    """One session per entry, with so many turns."""
    for number, length in enumerate(lengths):
        yield Session(tuple(Turn(f"{number}.{turn}", 2, think_s if turn else 0.0) for turn in range(length)))
