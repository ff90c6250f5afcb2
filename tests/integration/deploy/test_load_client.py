"""The client half of `baton load` against a scripted server on loopback: what it sends, what it notes, how it ends."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import ssl
import subprocess

import pytest
import uvloop

from deploy.router_url import parse_url
from deploy.tools.traffic.client import Client
from deploy.tools.traffic.connection import Address
from deploy.tools.traffic.figures.record import UNFINISHED
from deploy.tools.traffic.request_builder import RequestBuilder
from deploy.tools.traffic.runner import LoadRunner, Storm
from deploy.tools.traffic.target import Target, resolve
from deploy.tools.traffic.workloads.driver import Driver, HangUps, Limits
from deploy.tools.traffic.workloads.workload import Session, Turn
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.mock_openai import Behaviour, serving, token_of
from tests.support.web.virtual_load import single_turns, talks


def load(
    behaviour, sessions=None, *, count=5, api="chat", until_s=HANG_GUARD_S, timeout_s=HANG_GUARD_S, tls=None, **more
):
    """(mock, records) of a load whose requests are all due at once."""

    async def play():
        async with serving(behaviour, tls=tls and tls[0]) as mock:
            url = parse_url(f"http://127.0.0.1:{mock.port}")
            address = resolve(url)
            if tls:
                address = Address(address.family, address.sockaddr, "localhost", tls[1])
            driver = Driver(sessions or single_turns(6), iter([0.0] * count), 0, Limits(), more.pop("hang_ups", None))
            client = Client([address], timeout_s)
            runner = LoadRunner(
                driver, client, RequestBuilder(Target(url, "mock", behaviour.ours), api), until_s=until_s, **more
            )
            records = await runner.run()
            client.close()
            while mock.num_open:  # until the server has noticed all that left
                await asyncio.sleep(0.001)
            return mock, records

    return uvloop.run(play())


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("per_chunk", [1, 4])
def test_every_token_is_noted(api, per_chunk):
    mock, records = load(Behaviour(per_chunk=per_chunk), api=api)
    assert len(records) == len(mock.seen) == 5
    for number, record in enumerate(records):
        assert record.is_whole and record.error == "" and record.status == 200
        assert record.ids == [token_of(f"prompt {number}", i) for i in range(6)]
        assert record.text == "".join(f" w{token}" for token in record.ids)
        assert list(record.counts) == ([1] * 6 if per_chunk == 1 else [4, 2])
        assert (record.num_tokens, record.prompt_tokens, record.finish_reason) == (6, 2, "length")
        assert record.sent <= record.at[0] <= record.at[-1] <= record.end
        assert list(record.at) == sorted(record.at)


def test_a_foreign_server_is_asked_in_plain_openai_words():
    mock, records = load(Behaviour(ours=False))
    fields = {"model", "max_tokens", "temperature", "top_p", "stream", "stream_options", "messages"}
    assert set(mock.seen[0]) == fields
    assert all(record.is_whole and not record.ids and record.num_tokens == 6 for record in records)


def test_arrival_times_are_the_kernels_where_it_gives_them():
    _, records = load(Behaviour(itl_s=0.001))
    late = [one for record in records for one in record.late if not math.isnan(one)]
    assert late and min(late) >= 0


def test_connections_are_reused_and_a_server_may_close_them():
    mock, records = load(Behaviour(), talks([20]), count=1)
    assert mock.num_connections == 1 and all(record.is_whole for record in records)
    mock, records = load(Behaviour(closes=True), talks([20]), count=1)
    assert mock.num_connections > 1 and len(records) == 20 and all(record.is_whole for record in records)


def test_a_later_turn_carries_what_was_said():
    mock, _ = load(Behaviour(), talks([2]), count=1)
    roles = [[message["role"] for message in body["messages"]] for body in mock.seen]
    assert roles == [["user"], ["user", "assistant", "user"]]
    assert mock.seen[1]["messages"][1]["content"].startswith(" w")


def test_refusals_carry_the_servers_words():
    _, records = load(Behaviour(refuse=503))
    assert {record.error for record in records} == {"503 not now"} and not any(record.is_whole for record in records)


def test_an_answer_that_breaks_off_is_a_failure():
    _, records = load(Behaviour(break_at=(2, 3)))
    broken = [record for record in records if record.error]
    assert len(broken) == 1 and "closed before" in broken[0].error and len(broken[0].at) == 3


def test_nobody_there():
    async def play():
        url = parse_url("http://127.0.0.1:9")
        runner = LoadRunner(
            Driver(single_turns(), iter([0.0]), 0, Limits()),
            Client([resolve(url)], 5.0),
            RequestBuilder(Target(url, "m", False)),
            until_s=60.0,
        )
        return await runner.run()

    (record,) = uvloop.run(play())
    assert record.error.startswith("no connection") and math.isfinite(record.end)


def test_a_defect_of_ours_ends_the_run_loudly(monkeypatch):
    def broken(self, data, at, late):
        raise ZeroDivisionError

    monkeypatch.setattr(Client, "perform", lambda self, exchange, message: broken(self, b"", 0.0, 0.0))
    with pytest.raises(ZeroDivisionError):
        load(Behaviour())


def test_the_client_tries_all_addresses_until_one_answers(monkeypatch):
    family, kind = socket.AF_INET, socket.SOCK_STREAM
    with socket.socket() as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        server.bind(("127.0.0.1", 0))
        server.listen()
        infos = [(family, kind, 6, "", one.getsockname()) for one in (closed, server)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: infos)
        assert resolve(parse_url("http://localhost:1")).sockaddr == server.getsockname()
    assert resolve(parse_url("http://localhost:1")).sockaddr == infos[0][4]  # nobody: the load will say so


def test_a_server_that_hangs_is_given_up_on():
    _, records = load(Behaviour(ttft_s=3600.0), count=2, timeout_s=0.05)
    assert {record.error for record in records} == {"no end within 0.05 s"}


def test_what_is_open_at_the_end_is_left_and_counted_as_failed():
    mock, records = load(Behaviour(ttft_s=3600.0), count=3, until_s=0.2)
    assert {record.error for record in records} == {UNFINISHED} and not any(record.hung_up for record in records)


def test_hang_ups_leave_after_their_chunk():
    mock, records = load(Behaviour(itl_s=0.001), single_turns(8), count=30, hang_ups=HangUps(0.5, 1))
    left = [record for record in records if record.hung_up]
    assert 5 < len(left) < 25 and not any(record.error for record in records)
    assert all(len(record.at) < 8 for record in left)
    assert all(record.is_whole for record in records if not record.hung_up)


def test_a_storm_takes_its_share_of_the_open_ones():
    behaviour = Behaviour(ttft_s=3600.0)
    mock, records = load(behaviour, count=8, until_s=2.0, storms=[Storm(1.0, 0.75)])
    assert [record.hung_up for record in records] == [True] * 6 + [False] * 2
    assert mock.num_gone == 8


@pytest.fixture(scope="module")
def tls_contexts(tmp_path_factory):
    """A certificate of its own for localhost; (server's, client's)."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=certificate)


def test_https(tls_contexts):
    _, records = load(Behaviour(), tls=tls_contexts)
    assert all(record.is_whole and record.num_tokens == 6 for record in records)


def test_an_unknown_certificate_is_no_connection(tls_contexts):
    _, records = load(Behaviour(), tls=(tls_contexts[0], ssl.create_default_context()), count=1)
    assert records[0].error.startswith("no connection")


def test_a_prompt_that_no_socket_takes_at_once(tls_contexts):
    long = "word " * 2_000_000
    for tls in (None, tls_contexts):
        mock, records = load(Behaviour(), iter([Session((Turn(long, 2),))]), count=1, tls=tls)
        assert records[0].is_whole and len(mock.seen[0]["messages"][0]["content"]) == len(long)
