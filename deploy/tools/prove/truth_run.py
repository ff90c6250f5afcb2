"""Run `baton prove URL`: send the requests in every way, and judge the answers."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from deploy.metrics_page import Page, Sample, parse_page
from deploy.router_http import printable
from deploy.tools.prove import truths
from deploy.tools.prove.asks import Ask, Way, make_asks, make_fillers, staggered
from deploy.tools.prove.counters import engine_of, moved
from deploy.tools.prove.partings import NOISE
from deploy.tools.prove.recorded import RecordedAnswer
from deploy.tools.prove.served import AnyServer
from deploy.tools.prove.truth_report import TruthReport
from deploy.tools.prove.truths import AskedGroup
from deploy.tools.traffic.target import Server
from shared.core.errors import ConfigError

METRICS_WAIT_S = 1.5  # engines update their counters after an answer's end, Baton's nodes twice a second
ALONE, ALONE_LATER = "alone", "alone, after the crowd"
AGAIN, WHOLE, CROWD = "again, from caches", "again, not streamed", "in a crowd"
OTHERWISE, COLD = "other order and times", "in a crowd, nothing cached"


@dataclass(frozen=True, slots=True)
class ProvedServer:
    """The server under test. `pages`: where its metrics are, if not beside its API."""

    server: Server
    model: str
    owner: str
    pages: Sequence[Server]


def prove_server(proved: ProvedServer, asked: AnyServer, dtype: str, max_tokens: int, salt: str) -> TruthReport:
    salt = salt or secrets.token_hex(3)
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    before = read_pages(proved.pages)
    asked.find_offers()
    refused = dict(asked.offers.refused)
    groups = run_ways(asked, salt, refused)
    cached, handed_over = [], []
    if before is not None:
        time.sleep(METRICS_WAIT_S)
        after = read_pages(proved.pages)
        cached = moved(before, after, lambda engine: engine.cached)
        handed_over = moved(before, after, lambda engine: engine.handed_over)
    else:
        refused["metrics"] = "no page at " + ", ".join(f"{page.url}/metrics" for page in proved.pages)
    noise = NOISE[dtype]
    partings = truths.all_partings(groups, noise)
    checks = [
        truths.check_replies(groups),
        *truths.check_streams(groups, partings),
        truths.check_seeds(groups[0]),
        truths.check_structured(groups, refused.get("JSON", "")),
        truths.check_scores(groups, refused.get("logprobs", "")),
        truths.check_repeats(groups, noise),
        truths.check_usage(groups, max_tokens),
        truths.check_prefixes(truths.told_cached(groups), cached),
        truths.check_hand_offs(handed_over),
    ]
    return TruthReport(
        server=str(proved.server.url),
        engine=named(proved, before),
        model=printable(proved.model),
        begun=begun,
        command=shlex.join(["baton", *sys.argv[1:]]),
        salt=salt,
        api="chat completions" if asked.offers.is_chat else "completions",
        dtype=dtype,
        noise=noise,
        refused=refused,
        rows=truths.rows_of(groups, partings),
        partings=partings,
        checks=checks,
    )


def run_ways(asked: AnyServer, salt: str, refused: dict[str, str]) -> list[AskedGroup]:
    """Ask one list first alone, and another first in a crowd. Fill `refused` with the requests that aren't taken."""
    asks, cold = make_asks(f"{salt}a"), make_asks(f"{salt}b")
    fillers = make_fillers(salt)
    if not asked.offers.is_chat:
        refused["JSON"] = "completions have no response_format"
        asks, cold = ([ask for ask in many if ask.kind != "structured"] for many in (asks, cold))
    first = send_asks(asked, asks, Way(ALONE))
    taken = [not answer.is_refused for answer in first]
    refused |= {ask.name: one.error for ask, one in zip(asks, first, strict=True) if one.is_refused}
    asks = [ask for ask, is_taken in zip(asks, taken, strict=True) if is_taken]
    cold = [ask for ask, is_taken in zip(cold, taken, strict=True) if is_taken]
    answers = {ALONE: [one for one in first if not one.is_refused]}
    for way in (Way(AGAIN), Way(WHOLE, streamed=False)):
        answers[way.name] = send_asks(asked, asks, way)
    answers[CROWD] = crowd(asked, asks, fillers, CROWD)
    turned = send_asks(asked, asks[::-1], Way(OTHERWISE, offsets=staggered(len(asks))))
    answers[OTHERWISE] = turned[::-1]
    in_crowd = crowd(asked, cold, [replace(one, prompt=f"b{one.prompt}") for one in fillers], COLD)
    later = send_asks(asked, cold, Way(ALONE_LATER))
    return [AskedGroup(asks, answers), AskedGroup(cold, {ALONE_LATER: later, COLD: in_crowd})]


def crowd(asked: AnyServer, asks: Sequence[Ask], fillers: Sequence[Ask], name: str) -> list[RecordedAnswer]:
    """Send all at once, with fillers between. Return the answers to `asks`."""
    together = [*fillers[::2], *asks, *fillers[1::2]]
    answers = send_asks(asked, together, Way(name, offsets=(0.0,) * len(together)))
    return answers[len(fillers[::2]) :][: len(asks)]


def send_asks(asked: AnyServer, asks: Sequence[Ask], way: Way) -> list[RecordedAnswer]:
    return asked.perform(asks, way, SentWay(way.name, len(asks)).tell) if asks else []


class SentWay:
    """Shows on stderr how many answers of a way have come: stdout is the report's."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._begun = name, total, time.monotonic()
        self._count = 0
        self._lock = threading.Lock()

    def tell(self) -> None:
        with self._lock:
            self._count += 1
            is_last = self._count == self._total
            if is_last or sys.stderr.isatty():
                text = f"{self._name}: {self._count} of {self._total}, {time.monotonic() - self._begun:.1f} s"
                print(
                    f"\r{text}" if sys.stderr.isatty() else text,
                    end="\n" if is_last else "",
                    file=sys.stderr,
                    flush=True,
                )


def read_pages(pages: Sequence[Server]) -> Page | None:
    """Return all servers' metrics as one page; None if one has none."""
    samples: list[Sample] = []
    for page in pages:
        try:
            status, body = page.get("/metrics")
        except ConfigError:
            return None
        if status != 200:
            return None
        samples += parse_page(body.decode("utf-8", "replace")).samples
    return Page(tuple(samples))


def named(proved: ProvedServer, page: Page | None) -> str:
    """Return the engine and, where a known path tells it, its version."""
    engine = engine_of(page, proved.owner)
    for path, key in (("/version", "version"), ("/props", "build_info"), ("/get_server_info", "version")):
        try:
            status, body = proved.server.get(path)
            if status == 200 and (version := json.loads(body).get(key)):
                return printable(f"{engine} {version}")
        except (ConfigError, ValueError, AttributeError, RecursionError):
            continue
    return printable(engine)
