"""The listening socket, the key, and the pieces around an exchange that need no server."""

from __future__ import annotations

import ast
import asyncio
import socket
from pathlib import Path

import pytest

from router.api.endpoint import given_keys, until_hang_up
from router.app import new_epoch
from router.http.connection import SEND_CHUNK, Connection
from router.http.errors import ClientGone, error_headers, error_type
from router.http.server import bind_http
from router.tenants.book import Tenants
from router.tenants.keys_file import one_key
from router.tenants.tenant import EVERYBODY
from shared.core.errors import BodyTooLarge, ConfigError, NoNodes, Overloaded
from shared.wire.keys.http_keys import read_key


def test_accepted_sockets_send_small_writes_at_once() -> None:
    listener = bind_http("127.0.0.1", 0)
    try:
        with socket.create_connection(listener.getsockname()) as _:
            listener.setblocking(True)
            accepted, _address = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        listener.close()


def test_a_taken_port_names_itself() -> None:
    listener = bind_http("127.0.0.1", 0)
    port = listener.getsockname()[1]
    try:
        with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: can't listen there: Address already"):
            bind_http("127.0.0.1", port)
    finally:
        listener.close()


@pytest.mark.parametrize("header", [None, "", "secret", "Basic secret", "Bearer", "Bearer other", "Bearer sécret"])
def test_a_wrong_key(header: str | None) -> None:
    assert Tenants(one_key("secret")).find(given_keys(header, None)) is None


def test_a_right_key() -> None:
    both = [("Bearer secret", None), ("bearer  secret ", "other"), (None, "secret"), ("Bearer other", "secret")]
    for authorization, x_api_key in both:
        assert Tenants(one_key("secret")).find(given_keys(authorization, x_api_key)) is EVERYBODY


def test_where_the_key_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert read_key("", "--api-key-file") == ""
    file.write_text(" abc \n")
    file.chmod(0o600)
    assert read_key(str(file), "--api-key-file") == "abc"
    file.write_text("\n")
    for bad in (file, tmp_path / "none"):
        with pytest.raises(ConfigError, match="--api-key-file"):
            read_key(str(bad), "--api-key-file")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_is_none(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("abc\n")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"--admin-key-file: .*chmod 600 {file}"):
        read_key(str(file), "--admin-key-file")


def test_an_epoch_rises_with_every_start() -> None:
    assert new_epoch().bit_length() < 63 and new_epoch() >> 16 <= new_epoch() >> 16


def test_what_may_be_tried_again_says_when() -> None:
    for error in (NoNodes("x"), Overloaded("x")):
        assert (b"retry-after", b"7") in error_headers(error, 7)
    assert error_type(429) == "rate_limit_error" and error_type(500) == "server_error"


def connection(messages: list[dict[str, object]], sent: list[str], *, blocks: bool = False) -> Connection:
    queue = list(messages)

    async def receive() -> dict[str, object]:
        if not queue:
            await asyncio.get_running_loop().create_future()
        return queue.pop(0)

    async def send(message: object) -> None:
        if blocks:
            await asyncio.get_running_loop().create_future()
        sent.append(str(message))

    return Connection({"type": "http", "headers": []}, receive, send, slow_reader_s=0.01)


def part(data: bytes, more: bool = True) -> dict[str, object]:
    return {"type": "http.request", "body": data, "more_body": more}


GONE: dict[str, object] = {"type": "http.disconnect"}


def test_a_body_is_read_up_to_its_limit() -> None:
    assert asyncio.run(connection([part(b"ab"), part(b"c", False)], []).body.read(3)) == b"abc"
    with pytest.raises(BodyTooLarge):
        asyncio.run(connection([part(b"ab"), part(b"cd")], []).body.read(3))
    with pytest.raises(ClientGone):
        asyncio.run(connection([part(b"ab"), GONE], []).body.read(3))


def test_a_client_that_reads_nothing_is_given_up() -> None:
    with pytest.raises(ClientGone):
        asyncio.run(connection([], [], blocks=True).answer(200, b"x"))


def test_what_can_be_sent_at_once_needs_no_message() -> None:
    chunks: list[bytes] = []
    sent: list[str] = []
    is_free = True

    def send_chunk(data: bytes) -> bool:
        if is_free:
            chunks.append(data)
        return is_free

    async def send(message: object) -> None:
        sent.append(str(message))

    async def receive() -> dict[str, object]:
        return GONE

    async def main() -> None:
        nonlocal is_free
        scope = {"type": "http", "headers": [], "state": {SEND_CHUNK: send_chunk}}
        connection = Connection(scope, receive, send, slow_reader_s=0.01)
        await connection.write(b"a")
        is_free = False  # the client is behind
        await connection.write(b"b")
        is_free = True
        await connection.write(b"c", last=True)
        await connection.unsent().write(b"d")

    asyncio.run(main())
    assert chunks == [b"a"]
    assert [message["body"] for message in map(ast.literal_eval, sent)] == [b"b", b"c"]


def test_headers_of_a_kept_answer_reach_its_client() -> None:
    mine = connection([], [])
    mine.unsent().more_headers[b"x-ratelimit-limit-tokens"] = b"60"
    assert mine.more_headers == {b"x-ratelimit-limit-tokens": b"60"}


def test_work_ends_when_the_client_goes() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        with pytest.raises(ClientGone):
            await until_hang_up(connection([GONE], []), work())
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0

    asyncio.run(main())


def test_a_cancellation_from_elsewhere_is_not_a_hang_up() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(until_hang_up(connection([], []), asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_work_that_is_done_stays_done() -> None:
    """uvicorn reports a disconnect after each complete answer; that is no hang-up."""

    async def main() -> None:
        sent: list[str] = []
        mine = connection([GONE], sent)

        async def work() -> None:
            await mine.answer(200, b"x")
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        await until_hang_up(mine, work())
        assert len(sent) == 2

    asyncio.run(main())
