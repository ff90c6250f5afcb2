"""HTTPS at a router: a renewed certificate, clients that are silent or speak plain HTTP, and streams as without TLS."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from deploy import cli
from tests.support.clusters.key_folders import write_key
from tests.support.clusters.metrics_page import bearer
from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.answering import answering
from tests.support.wire.tcp_relay import make_certificate

KEY = "a-key"
MOST, LINGERING = 4, 64  # connections; MOST_LINGERING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("https")
    make_certificate(folder)
    write_key(folder / "api.key", KEY)
    return folder


@pytest.fixture(scope="module")
def router(folder: Path) -> Iterator[RouterProcess]:
    tls = ("--tls-cert", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key"))
    keys = ("--api-key-file", str(folder / "api.key"))
    process = RouterProcess(*tls, *keys, "--max-connections", str(MOST), "--header-timeout-s", "2", api_key=KEY)
    yield process
    assert process.stop() == 0
    assert not [line for line in process.lines if " ERROR " in line]


@pytest.fixture
def node(router: RouterProcess) -> Iterator[FakeNode]:
    node = FakeNode("decode", router.nodes, "d0").start()
    yield node
    node.stop()


def port_of(router: RouterProcess) -> int:
    return int(router.url.rpartition(":")[2])


def trust(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "tls.crt")


def client(router: RouterProcess, folder: Path) -> httpx.Client:
    url = f"https://localhost:{port_of(router)}"
    return httpx.Client(base_url=url, verify=trust(folder), headers=bearer(KEY), timeout=HANG_GUARD_S)


def refusals(router: RouterProcess, folder: Path, code: str) -> float:
    with client(router, folder) as http:
        lines = http.get("/metrics").text.splitlines()
    name = f'baton_requests_total{{outcome="{code}"}} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def status_of_health(router: RouterProcess, folder: Path) -> int:
    """0 without an answer."""
    try:
        with client(router, folder) as http:
            return http.get("/health").status_code
    except httpx.TransportError:
        return 0


def shown_certificate(router: RouterProcess) -> bytes | None:
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    with anyone.wrap_socket(dialled(router)) as connection:
        return connection.getpeercert(binary_form=True)


def dialled(router: RouterProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(router)), HANG_GUARD_S)


def shaken(router: RouterProcess, folder: Path, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    return (context or trust(folder)).wrap_socket(dialled(router), server_hostname="localhost")


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_a_sdk_streams_over_https(router: RouterProcess, node: FakeNode, folder: Path) -> None:
    assert router.url.startswith("https://127.0.0.1:")
    with httpx.Client(verify=trust(folder)) as http:
        sdk = openai.OpenAI(base_url=f"https://localhost:{port_of(router)}/v1", api_key=KEY, http_client=http)
        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        create = sdk.completions.create
        stream = create(model="hashlm", prompt="say:abc", max_tokens=20, stream=True, extra_headers=trace)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == "abc"
        assert node.generates[-1].trace == trace["traceparent"]
        wrong = openai.OpenAI(base_url=f"https://localhost:{port_of(router)}/v1", api_key="no", http_client=http)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_any_host_name_is_served_that_the_certificate_has(router: RouterProcess, folder: Path) -> None:
    with client(router, folder) as http:
        assert http.get("/health", headers={"host": "llm.example.com"}).status_code == 200


def test_old_tls_is_refused(router: RouterProcess, folder: Path) -> None:
    old = trust(folder)
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    before = refusals(router, folder, "tls_failed")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shaken(router, folder, old)
    eventually(lambda: refusals(router, folder, "tls_failed") == before + 1)
    with shaken(router, folder) as connection:
        assert connection.version() in ("TLSv1.2", "TLSv1.3")


def test_plain_http_is_told_to_use_https(router: RouterProcess, folder: Path) -> None:
    answer = httpx.post(
        f"http://127.0.0.1:{port_of(router)}/v1/completions", json={"prompt": "x"}, timeout=HANG_GUARD_S
    )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "plain_http"
    assert "https://" in answer.json()["error"]["message"]
    with dialled(router) as connection:  # a body that is never read must not cost the client its answer
        connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1_000_000)
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    assert refusals(router, folder, "plain_http") == 2


def test_a_refusal_within_tls_reaches_its_client(router: RouterProcess, folder: Path) -> None:
    with shaken(router, folder) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * 300_000)
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("begun", [b"", b"\x16", b"\x16\x03\x01"])
def test_a_silent_client_is_hung_up_and_counted(router: RouterProcess, folder: Path, begun: bytes) -> None:
    before = refusals(router, folder, "tls_timeout")
    with dialled(router) as connection:
        connection.sendall(begun)
        assert read_all(connection) == b""
    eventually(lambda: refusals(router, folder, "tls_timeout") == before + 1)


def test_silent_clients_keep_nobody_out(router: RouterProcess, folder: Path) -> None:
    silent = [dialled(router) for _ in range(MOST + LINGERING + 10)]
    try:
        assert status_of_health(router, folder) == 200
        first = silent[0]
        assert first.recv(1) == b"", "the oldest had to go"
        assert refusals(router, folder, "too_many_connections") >= 10
    finally:
        for connection in silent:
            connection.close()


def test_who_is_above_the_limit_is_told_so(router: RouterProcess, folder: Path) -> None:
    inside = [shaken(router, folder) for _ in range(MOST)]
    try:
        with shaken(router, folder) as outside:
            assert read_all(outside).startswith(b"HTTP/1.1 503 ")
    finally:
        for connection in inside:
            connection.close()


def test_a_certificate_is_renewed_under_a_stream(
    router: RouterProcess, node: FakeNode, folder: Path, tmp_path: Path
) -> None:
    old = ssl.PEM_cert_to_DER_cert((folder / "tls.crt").read_text())
    body = {"prompt": "say:abcdef", "max_tokens": 20, "stream": True}
    node.paused.set()
    with client(router, folder) as http, http.stream("POST", "/v1/completions", json=body) as answer:
        eventually(lambda: node.num_running == 1)
        (folder / "tls.crt").write_text("-----BEGIN CERTIFICATE-----\nhalf")
        eventually(lambda: any("the TLS certificate stays as it was" in line for line in router.lines))
        assert shown_certificate(router) == old
        for file in make_certificate(tmp_path):
            shutil.copy(file, folder / file.name)
        eventually(lambda: any("the TLS certificate was read again" in line for line in router.lines))
        assert shown_certificate(router) not in (old, None)
        node.paused.clear()
        text = answer.read().decode()
    assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"stop"' in text


def test_a_command_says_why_tls_fails(
    router: RouterProcess, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"https://localhost:{port_of(router)}"
    write_key(tmp_path / "admin.key", "op")
    admin = ("admin", "--admin-key-file", str(tmp_path / "admin.key"))
    assert cli.main([*admin, "status", url]) == 2
    assert "certificate is not trusted (self-signed certificate); --ca FILE" in capsys.readouterr().err
    assert cli.main([*admin, "--ca", str(folder / "tls.crt"), "status", url]) == 2
    assert "admin is off" in capsys.readouterr().err, "it got as far as that"
    assert cli.main([*admin, "status", url.replace("https", "http")]) == 2
    assert "write https:// in the URL" in capsys.readouterr().err
    with answering(b"") as plain:
        assert cli.main([*admin, "status", plain.replace("http:", "https:")]) == 2
    assert "it does not speak TLS" in capsys.readouterr().err
