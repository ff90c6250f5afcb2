"""What a client calls its session goes with its requests as far as the policy."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.site.generation import MAX_SESSION_CHARS, session_of
from router.http.connection import Connection
from router.requests.new_request import NewRequest
from shared.core.sampling_params import SamplingParams
from tests.support.worlds.router_rig import RouterRig


async def nothing(*_: Any) -> Any:
    raise AssertionError("nothing is read or written")


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, ""),
        ({"x-session-id": "s"}, "s"),
        ({"x-correlation-id": "c"}, "c"),
        ({"x-correlation-id": "c", "x-session-id": "s"}, "s"),
        ({"x-session-id": "s" * 1000}, "s" * MAX_SESSION_CHARS),
    ],
)
def test_a_session_is_what_a_header_calls_it(headers: dict[str, str], session: str) -> None:
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert session_of(Connection({"type": "http", "headers": sent}, nothing, nothing, 1.0)) == session


def test_a_request_carries_its_session_and_its_picks_are_told() -> None:
    rig = RouterRig()
    rig.join("prefill", "p")
    rig.join("decode", "d")
    new = NewRequest([1, 2, 3], 1, SamplingParams(max_tokens=5), seed=7, affinity="s")
    _, effects = rig.dispatcher.open([new], 0.0)
    (request,) = rig.journal.all()
    assert request.asked.affinity == "s" and request.pages is not None
    assert sorted(effects.picks) == [("decode", "only"), ("prefill", "only")]
