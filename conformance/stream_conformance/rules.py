"""The contract's rules, each as a check of a running server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stream_conformance.apis import answer_ids, tokens_used
from stream_conformance.client import Reading
from stream_conformance.run import (
    ASKED,
    Failed,
    NotOffered,
    NotTested,
    Run,
    check_refused,
    in_other_words,
    last_event_id,
)
from stream_conformance.sse import ContractBroken, Event

MOST_PLACES = 6
CUT_AFTER = 4  # events
ROUNDS = 4
LONG = 8  # times the usual length: for streams that are to be broken


def every_event_has_an_id(run: Run) -> str:
    bare = [number for number, event in enumerate(run.basis, start=1) if not event.id]
    if bare:
        raise Failed(f"event {bare[0]} of {len(run.basis)} has none")
    odd = [event.id for event in run.basis if not (event.id.isascii() and event.id.isprintable())]
    if odd:
        raise Failed(f"{odd[0][:40]!r} is not printable ASCII")
    return f"{len(run.basis)} events"


def ids_only_when_asked(run: Run) -> str:
    events = run.cut(run.body(), CUT_AFTER, {})
    if any(event.id for event in events):
        raise Failed("a client that did not ask got ids")
    return ""


def numbers_rise_by_one(run: Run) -> str:
    place = run.place()
    events = [*run.basis[:place], *run.rest(run.body(), run.basis[:place])]
    numbers = [event.number for event in events]
    if numbers != list(range(1, len(numbers) + 1)):
        at = next(n for n, number in enumerate(numbers, start=1) if number != n)
        raise Failed(f"the id of event {at} is {events[at - 1].position[:40]!r}")
    return f"1 to {len(numbers)}, continued after {place}"


def first_id_has_the_token(run: Run) -> str:
    rest = run.rest(run.body(), run.basis[: run.place()])
    if "/" not in rest[0].id:
        raise Failed("the first id of a continuation has none")
    return ""


def rest_is_exact(run: Run) -> str:
    step = max(1, (len(run.basis) - 1) // MOST_PLACES)
    places = list(range(1, len(run.basis), step))
    for place in places:
        run.compare(run.basis, [*run.basis[:place], *run.rest(run.body(), run.basis[:place])], f"after event {place}")
    return f"after events {', '.join(map(str, places))}"


def drawn_seeds_are_kept(run: Run) -> str:
    body = run.body(is_drawn=True)
    whole = run.whole(body)
    for place in (1, max(1, len(whole) // 2)):
        run.compare(whole, [*whole[:place], *run.rest(body, whole[:place])], f"after event {place}")
    return ""


def broken_streams_continue(run: Run) -> str:
    body = run.body(LONG)
    seen = run.cut(body, CUT_AFTER)
    rest = run.rest(body, seen)
    run.compare(run.settled(body, seen[0]), [*seen, *rest], f"cut after event {len(seen)}")
    return f"cut after event {len(seen)} of {len(seen) + len(rest)}"


def open_streams_continue(run: Run) -> str:
    """The client reads its first connection no more, and has not closed it."""
    body, got = run.body(LONG), list[Event]()

    def until(events: list[Event]) -> bool:
        seen = Reading(events=events).marked
        if len(seen) == CUT_AFTER:
            got.extend([*seen, *run.rest(body, seen)])
        return bool(got)

    run.asker.ask(body, ASKED, until=until)
    if not got:
        raise NotTested("the model's answers end too early")
    run.compare(run.settled(body, got[0]), got, f"after event {CUT_AFTER}")
    return f"after event {CUT_AFTER}"


def continuations_continue(run: Run) -> str:
    body = run.body(LONG)
    seen = run.cut(body, CUT_AFTER)
    for _ in range(ROUNDS):
        if not any(event.is_end for event in seen):
            seen += run.cut(body, CUT_AFTER, {"Last-Event-ID": last_event_id(seen)})
    whole = seen if any(event.is_end for event in seen) else [*seen, *run.rest(body, seen)]
    run.compare(run.settled(body, seen[0]), whole, f"cut {ROUNDS + 1} times")
    return f"cut {ROUNDS + 1} times"


def a_place_serves_twice(run: Run) -> str:
    seen = run.basis[: run.place()]
    first, second = ([*seen, *run.rest(run.body(), seen)] for _ in range(2))
    run.compare(first, second, "the second time")
    return ""


def nothing_follows_the_end(run: Run) -> str:
    reading = run.after(run.body(), run.basis)
    if reading.status not in (200, 204) or reading.errors:
        raise Failed(f"status {reading.status} {reading.errors[:100]}")
    if reading.marked:
        raise Failed(f"{len(reading.marked)} events after the last one")
    return f"status {reading.status}"


def the_answer_keeps_its_id(run: Run) -> str:
    new = answer_ids(run.rest(run.body(), run.basis[:1])) - answer_ids(run.basis)
    if new:
        raise Failed(f"a continuation says {min(new)}")
    return ""


def usage_counts_the_whole_answer(run: Run) -> str:
    seen = run.basis[: max(2, len(run.basis) // 2)]
    counts = [tokens_used(events, run.api.used) for events in (run.basis, run.rest(run.body(), seen))]
    if counts[0] is None:
        raise NotTested("the stream has no usage")
    if counts[0] != counts[1]:
        raise Failed(f"{counts[1]} tokens instead of {counts[0]}")
    return f"{counts[0]} tokens"


def another_body_is_refused(run: Run) -> str:
    body = run.body(more=" And then?")
    return check_refused(run.after(body, run.basis[: run.place()]), "resume_mismatch")


def bodies_are_compared_by_meaning(run: Run) -> str:
    seen = run.basis[: run.place()]
    run.compare(run.basis, [*seen, *run.rest(in_other_words(run.body()), seen)], "with the same JSON in other bytes")
    return ""


def other_tokens_are_refused(run: Run) -> str:
    token, _, position = last_event_id(run.basis[: run.place()]).rpartition("/")
    middle = len(token) // 2
    forged = token[:middle] + ("A" if token[middle] != "A" else "B") + token[middle + 1 :]
    reading = run.asker.ask(run.body(), {"Last-Event-ID": f"{forged}/{position}"})
    return check_refused(reading, "unknown_stream")


def malformed_ids_are_refused(run: Run) -> str:
    return check_refused(run.asker.ask(run.body(), {"Last-Event-ID": "7"}), "unknown_stream")


def other_places_are_refused(run: Run) -> str:
    longer = run.whole(run.body(LONG))  # to its end: how many tokens an event has depends on the server's load
    if run.text(longer) == run.text(run.basis):  # positions count events, too, so they may differ
        raise NotTested("the model's answers end too early")
    token = last_event_id(run.basis).rpartition("/")[0]
    reading = run.asker.ask(run.body(), {"Last-Event-ID": f"{token}/{longer[-1].position}"})
    return check_refused(reading, "resume_mismatch")


def continuing_needs_the_key(run: Run) -> str:
    if not run.options.has_key:
        raise NotTested("no --key")
    reading = run.after(run.body(), run.basis[: run.place()], with_key=False)
    if reading.status not in (401, 403):
        raise Failed(f"status {reading.status} without a key")
    return f"status {reading.status}"


def other_servers_continue(run: Run) -> str:
    if len(run.asker.urls) < 2:
        raise NotTested("one URL")
    for url in run.asker.urls[1:]:
        seen = run.basis[: run.place()]
        run.compare(run.basis, [*seen, *run.rest(run.body(), seen, url=url)], f"at {url}")
    return f"{len(run.asker.urls)} servers"


def faults_lose_nothing(run: Run) -> str:
    if not run.options.hook:
        raise NotTested("no --fault-hook")
    body, has_run = run.body(LONG), False

    def meanwhile(events: list[Event]) -> None:
        nonlocal has_run
        if not has_run and len(events) >= CUT_AFTER:
            has_run = True
            run.hook()

    got, num_broken = run.asker.read_to_end(body, run.options.patience_s, meanwhile)
    run.compare(run.settled(body, got[0]), got, "with the fault")
    if not has_run:
        raise NotTested("the model's answers end too early")
    return f"the connection broke {num_broken} times"


def kept_answers_are_the_first_ones(run: Run) -> str:
    body = run.body(is_drawn=True) | {"stream": False}
    body.pop("stream_options", None)
    first, second = (run.asker.ask(body, {"Idempotency-Key": run.idempotency_key}) for _ in range(2))
    if first.status != 200:
        raise NotTested(f"status {first.status}")
    is_same, is_said = first.text == second.text, "idempotent-replayed" in second.headers
    if not is_same and not is_said:
        raise NotOffered("a repeated request is computed again")
    if not is_said and run.asker.ask(body, {}).text == first.text:
        raise NotOffered("a request has the same answer without the header")
    if not is_same or not is_said:
        raise Failed("the same answer without idempotent-replayed" if is_same else "another answer, as a kept one")
    return ""


def kept_keys_have_one_body(run: Run) -> str:
    body = run.body(more=" And then?") | {"stream": False}
    body.pop("stream_options", None)
    return check_refused(run.asker.ask(body, {"Idempotency-Key": run.idempotency_key}), "idempotency_key_reused")


Check = Callable[[Run], str]
IDS, TWICE, NUMBERS = every_event_has_an_id, a_place_serves_twice, numbers_rise_by_one
# Each rule with the rules without which it means nothing: they must have passed.
RULES: dict[Check, tuple[Check, ...]] = {
    every_event_has_an_id: (),
    ids_only_when_asked: (IDS,),
    rest_is_exact: (IDS,),
    a_place_serves_twice: (rest_is_exact,),
    first_id_has_the_token: (TWICE,),
    numbers_rise_by_one: (TWICE,),
    drawn_seeds_are_kept: (TWICE,),
    broken_streams_continue: (NUMBERS,),
    open_streams_continue: (broken_streams_continue,),
    continuations_continue: (broken_streams_continue,),
    nothing_follows_the_end: (TWICE,),
    the_answer_keeps_its_id: (TWICE,),
    usage_counts_the_whole_answer: (TWICE,),
    bodies_are_compared_by_meaning: (TWICE,),
    another_body_is_refused: (IDS,),
    other_tokens_are_refused: (IDS,),
    malformed_ids_are_refused: (IDS,),
    other_places_are_refused: (IDS,),
    continuing_needs_the_key: (IDS,),
    other_servers_continue: (TWICE,),
    faults_lose_nothing: (continuations_continue,),
    kept_answers_are_the_first_ones: (),
    kept_keys_have_one_body: (kept_answers_are_the_first_ones,),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`result`: pass, fail, not offered or not tested."""

    rule: str
    result: str
    remark: str


def name_of(check: Check) -> str:
    return check.__name__.replace("_", " ")


def judge(run: Run) -> Iterator[Verdict]:
    """Yield each rule's verdict. Raise ConnectionError if there is no stream at all."""
    results: dict[Check, str] = {}
    for check, needed in RULES.items():
        missing = next((rule for rule in needed if results[rule] != "pass"), None)
        if missing is not None:
            offered = results[missing] != "not offered"
            results[check], remark = ("not tested", f"needs: {name_of(missing)}") if offered else ("not offered", "")
        else:
            results[check], remark = judged(check, run)
        yield Verdict(name_of(check), results[check], remark)


def judged(check: Check, run: Run) -> tuple[str, str]:
    try:
        return "pass", check(run)
    except (ContractBroken, Failed, PermissionError, TimeoutError, json.JSONDecodeError) as error:
        return "fail", str(error)
    except NotOffered as error:
        return "not offered", str(error)
    except NotTested as error:
        return "not tested", str(error)
