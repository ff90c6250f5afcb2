"""Check a run's answers and figures (README.md lists the checks; golden.py has the check `tokens`). Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.metrics_page import OPEN, Page, has_nodes, unrest
from deploy.tools.traffic.figures.check import Check
from deploy.tools.traffic.figures.record import RequestRecord
from deploy.tools.traffic.figures.summary import Lag
from deploy.tools.traffic.loop_lag import LoopLag

MOST_DETAILS = 5
LAG_BOUND_S = 0.020
TTFT_TOLERANCE, TTFT_SLACK_S = 0.10, 0.020  # the client's TTFT includes network time and waits for a core
ITL_TOLERANCE, ITL_SLACK_S = 0.05, 0.001


def check_answers(records: Sequence[RequestRecord]) -> Check:
    if not records:
        return Check("answers", "doubtful", "no request was sent: make --duration longer or --rate higher")
    failed = [record for record in records if record.error]
    left = sum(record.hung_up for record in records)
    note = f", {left} left by us on purpose" if left else ""
    resumed = sum(record.num_resumed > 0 for record in records)
    note += f", {resumed} went on after their connection broke" if resumed else ""
    if not failed:
        return Check("answers", "ok", f"all {len(records) - left} requests were answered to their end{note}")
    details = tuple(f"request {one.number} at {one.sent:.1f} s: {one.error}" for one in failed[:MOST_DETAILS])
    return Check("answers", "failed", f"{len(failed)} of {len(records)} requests failed{note}", details)


def check_stalls(records: Sequence[RequestRecord], bound_s: float, loop_lag: LoopLag) -> Check:
    """Check the waits between a stream's chunks, and from its last chunk to its end.

    A late read returns several chunks, all with the newest chunk's time. So a wait that our lateness may explain is
    doubtful instead of failed.
    """
    waits = [(wait, record, position) for record in records for position, wait in enumerate(record.waits(), 1)]
    stalls = [one for one in waits if one[0] >= bound_s]
    if not stalls:
        longest = max((wait for wait, _, _ in waits), default=0.0)
        return Check("stalls", "ok", f"no stream stood still for {bound_s:g} s; the longest wait was {longest:.3f} s")
    stalls.sort(key=lambda one: -one[0])
    details = tuple(stall_line(*one) for one in stalls[:MOST_DETAILS])
    num_streams = len({record.number for _, record, _ in stalls})
    text = f"{len(stalls)} waits of {bound_s:g} s and more, in {num_streams} streams"
    if all(wait - own_lateness(record, position, loop_lag) < bound_s for wait, record, position in stalls):
        return Check("stalls", "doubtful", f"{text}; but this program was late itself at that time", details)
    return Check("stalls", "failed", text, details)


def own_lateness(record: RequestRecord, position: int, loop_lag: LoopLag) -> float:
    """Return the client's worst lateness in the wait before chunk `position`, or before the end."""
    return loop_lag.worst_between(record.at[position - 1], [*record.at, record.end][position])


def stall_line(wait: float, record: RequestRecord, position: int) -> str:
    if position == len(record.at):
        return f"request {record.number}: {wait:.2f} s after its last chunk, until {record.end:.1f} s"
    return f"request {record.number}: {wait:.2f} s before chunk {position}, at {record.at[position]:.1f} s"


def check_rest(records: Sequence[RequestRecord], before: Page, after: Page | None, waited_s: float) -> Check:
    """Check /metrics after the load.

    `before`: the page before the load. `after`: the last page read, `waited_s` seconds after the load; None if no
    answer came. A request that is still open then belongs to another client, or never ends.
    """
    if after is None:
        return Check("leaks", "failed", f"/metrics no longer answers, {waited_s:.0f} s after the load")
    num_open = int(after.total(OPEN))
    if num_open and not is_all_ours(records, before, after):
        text = f"{num_open} requests are open that may not be ours, so leaks can't be judged"
        return Check("leaks", "doubtful", text)
    found = unrest(after)
    if num_open:
        text = f"{waited_s:.0f} s after the load {num_open} of our finished requests are still open there"
        return Check("leaks", "failed", text, tuple(found[:MOST_DETAILS]))
    if found:
        text = f"{waited_s:.0f} s after the load not all memory is back"
        return Check("leaks", "failed", text, tuple(found[:MOST_DETAILS]))
    if not has_nodes(after):
        return Check("leaks", "failed", "after the load no node is connected, so no memory can be seen")
    return Check("leaks", "ok", "all pages and rows of all nodes are free or cached again")


def is_all_ours(records: Sequence[RequestRecord], before: Page, after: Page) -> bool:
    """Return whether the server saw only our requests: its count lies between our answered and our sent requests."""
    met = ended_between(before, after) + after.total(OPEN)
    num_answered = sum(bool(record.status) and not record.hung_up for record in records)
    return not before.total(OPEN) and num_answered <= met <= len(records)


def ended_between(before: Page, after: Page) -> float:
    return after.total("baton_requests_total") - before.total("baton_requests_total")


def check_agreement(records: Sequence[RequestRecord], before: Page, after: Page, lag: Lag) -> Check:
    """A difference of latencies is doubtful, not failed, if the client was late."""
    ended = ended_between(before, after)
    answered = [record for record in records if record.status and not record.hung_up]
    left = sum(record.hung_up for record in records)  # the server may never have read these requests
    if not len(answered) <= ended <= len(answered) + left:
        own = f"{len(answered)} and {left} that it left"
        text = f"the server counts {ended:.0f} requests, the client {own}: others use the server too, or it restarted"
        return Check("agreement", "skipped", f"skipped: {text}")
    parts: list[str] = []
    is_near = True
    waits = [wait for record in records for wait, count in record.token_gaps() for _ in range(count)]
    for name, values, tolerance, slack in (
        ("ttft", [one.ttft for one in records if one.at], TTFT_TOLERANCE, TTFT_SLACK_S),
        ("itl", waits, ITL_TOLERANCE, ITL_SLACK_S),
    ):
        count, theirs = after.mean_since(before, f"baton_{name}_seconds")
        if not values or not count:
            continue
        ours = sum(values) / len(values)
        is_near &= abs(ours - theirs) <= max(tolerance * theirs, slack)
        parts.append(f"{name} {1e3 * ours:.1f} ms here, {1e3 * theirs:.1f} ms there")
    if not parts:
        return Check("agreement", "skipped", "skipped: no request brought a token")
    text = "means: " + "; ".join(parts)
    if is_near:
        return Check("agreement", "ok", text)
    if check_client(lag).verdict != "ok":
        return Check("agreement", "doubtful", f"{text}; but this program was late itself")
    return Check("agreement", "failed", text)


def check_client(lag: Lag) -> Check:
    if math.isnan(lag.send_p99):
        return Check("client", "ok", "no request was sent in the time that counts")
    parts = [f"sends {1e3 * lag.send_p99:.1f} ms late"]
    if not math.isnan(lag.handle_p99):
        parts.append(f"chunks handled {1e3 * lag.handle_p99:.1f} ms late")
    worst = max(one for one in (lag.send_p99, lag.handle_p99, 0.0) if not math.isnan(one))
    text = "p99: " + ", ".join(parts)
    if worst <= LAG_BOUND_S:
        return Check("client", "ok", text)
    return Check("client", "doubtful", f"{text}: the client was the bottleneck: run it on a faster or idler machine")


@dataclass(frozen=True, slots=True)
class Drill:
    """A node was taken away at `at_s`. `back_after_s`: the seconds until it served again, or NaN."""

    what: str  # kill, drain, restart
    node: str
    at_s: float
    back_after_s: float = math.nan


def check_drill(drill: Drill, records: Sequence[RequestRecord]) -> Check:
    beside = [one for one in records if one.sent < drill.at_s and (math.isnan(one.end) or one.end > drill.at_s)]
    failed = [one for one in beside if one.error]
    pauses = [gap for one in beside for at, gap in zip(one.at[1:], one.gaps(), strict=True) if at > drill.at_s]
    back = "not back" if math.isnan(drill.back_after_s) else f"serves again after {drill.back_after_s:.1f} s"
    text = (
        f"{drill.what} of {drill.node} at {drill.at_s:.1f} s under {len(beside)} streams: {len(failed)} failed, "
        f"longest pause {max(pauses, default=0.0):.2f} s; {drill.node} {back}"
    )
    if not beside:
        return Check("drills", "doubtful", f"{text}; no stream was open then, so nothing is proved")
    details = tuple(f"request {one.number}: {one.error}" for one in failed[:MOST_DETAILS])
    return Check("drills", "failed" if failed else "ok", text, details)
