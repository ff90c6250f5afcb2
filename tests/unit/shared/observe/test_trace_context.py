"""W3C traceparent: what is one, who hears of it, and which lines name it."""

from __future__ import annotations

import io
import json

import msgspec
import pytest

from router.dispatch.gateway import Gateway
from router.http.connection import Connection
from router.requests.new_request import NewRequest
from router.tenants.book import Tenants
from router.tenants.keys_file import parse_admins
from shared.core.sampling_params import SamplingParams
from shared.core.trace_context import traced, traceparent_of
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.wire import codec
from shared.wire.messages import Generate, Message
from shared.wire.peers import PeerClosed
from tests.support.cores.core_rig import CoreKnobs
from tests.support.wire.wire_samples import GENERATE
from tests.support.worlds.node_pair import make_node
from tests.unit.router.dispatch.test_router_absence import Story
from tests.unit.router.tenants.test_admin_rights import ADMINS, Site

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ([GIVEN], GIVEN),
        ([GIVEN.replace("00-", "cc-", 1) + "-more"], GIVEN.replace("00-", "cc-", 1)),
        ([], ""),
        ([GIVEN, GIVEN], ""),
        ([GIVEN + "-more"], ""),
        ([GIVEN.replace("00-", "cc-", 1) + "more"], ""),
        ([GIVEN.replace("00-", "ff-", 1)], ""),
        ([GIVEN.upper()], ""),
        ([GIVEN.replace(TRACE_ID, "0" * 32)], ""),
        ([GIVEN.replace(SPAN_ID, "0" * 16)], ""),
        ([GIVEN[:-1]], ""),
        ([GIVEN + "\n"], ""),
    ],
)
def test_only_the_standard_s_form_is_taken(given: list[str], taken: str) -> None:
    assert traceparent_of(given) == taken
    headers = [(b"traceparent", value.encode()) for value in given]
    connection = Connection({"type": "http", "headers": headers}, None, None, 1.0)  # type: ignore[arg-type]
    assert connection.trace == taken


def test_a_line_names_no_trace_that_is_none() -> None:
    assert traced(GIVEN) == {"trace_id": TRACE_ID}
    assert traced("") == traced("x" * 55) == traced(GIVEN + "\n") == {}


def told(stream: io.StringIO) -> list[dict[str, str]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


class Sent:
    endpoint = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.generates: list[Generate] = []
        self.peer = ""  # the last one's

    def send(self, peer: str, message: Message) -> bool:
        if isinstance(message, Generate):
            self.generates.append(message)
            self.peer = peer
        return True


def test_the_trace_goes_with_the_request_to_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    story, sent, lines = Story(max_attempts=2), Sent(), io.StringIO()
    gateway: Gateway = story.gateway
    monkeypatch.setattr(gateway, "_link", sent)
    monkeypatch.setattr(gateway, "_log", Logger("r", lines, level="debug", form="json"))
    gateway.open([NewRequest([1, 2, 3], 1, SamplingParams(max_tokens=5), seed=7, trace=GIVEN)], "cmpl-1")
    gateway.handle(PeerClosed(sent.peer))
    assert [(one.key.attempt, one.trace) for one in sent.generates] == [(0, GIVEN), (1, GIVEN)]
    begun, *gone = [line for line in told(lines) if "trace_id" in line]
    assert begun["message"] == "an answer is begun" and begun["answer"] == "cmpl-1"
    assert [line["key"].partition("#")[2] for line in gone] == ["0.0", "1.0"]
    assert {line["trace_id"] for line in (begun, *gone)} == {TRACE_ID}


def test_a_node_names_the_trace_and_an_older_sender_has_none() -> None:
    node, lines = make_node("decode", "d0", CoreKnobs()), io.StringIO()
    node.ctx.log = LogOnce(Logger("d0", lines, level="debug", form="json"))
    for number, trace in enumerate((GIVEN, "made up", "")):
        key = msgspec.structs.replace(GENERATE.key, rid=f"r{number}")
        node._take_generate("router", msgspec.structs.replace(GENERATE, key=key, trace=trace), 0.0)
    first, *others = [line for line in told(lines) if line["message"] == "a request has come"]
    assert first["trace_id"] == TRACE_ID and first["peer"] == "router" and "#" in first["key"]
    assert len(others) == 2 and not any("trace_id" in line for line in others)
    raw = msgspec.msgpack.decode(codec.encode(GENERATE))
    del raw["trace"]
    older = codec.decode(msgspec.msgpack.encode(raw))
    assert isinstance(older, Generate) and older.trace == ""


def test_a_call_of_an_operator_names_its_trace() -> None:
    site = Site(Tenants(parse_admins(ADMINS)))
    site.ask("POST", "/admin/drain", "shift", traceparent=GIVEN)
    assert site.lines()[0]["trace_id"] == TRACE_ID
