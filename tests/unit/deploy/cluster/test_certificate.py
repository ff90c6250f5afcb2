"""The files of the TLS certificate: what is refused, what is warned of, and what becomes of files that change."""

from __future__ import annotations

import http.client
import io
import ssl
import subprocess
from collections.abc import Callable
from http.server import HTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deploy.cluster.ready import is_ready
from deploy.router_http import own_connection
from router.http import certificate
from router.http.certificate import SOON_S, Certificate, load_certificate, show_expiry
from shared.core.errors import ConfigError
from shared.observe.log import Logger
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.serving import QuietHandler, serving
from tests.support.wire.tcp_relay import make_certificate

Pair = tuple[Path, Path]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_certificate(tmp_path)


def another(folder: Path) -> Pair:
    (folder / "other").mkdir()
    return make_certificate(folder / "other")


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def expire(pair: Pair) -> None:
    cert, key = pair
    request = cert.with_name("request")
    openssl("x509", "-x509toreq", "-in", cert, "-signkey", key, "-out", request)
    openssl("x509", "-req", "-in", request, "-days", 0, "-signkey", key, "-out", cert)


def refusal_of(cert: Path, key: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load_certificate(str(cert), str(key))
    return refused.value.message


def test_a_certificate_is_loaded_with_its_end(pair: Pair) -> None:
    loaded = load_certificate(*map(str, pair))
    assert loaded.doubt == "" and loaded.until > 0
    assert loaded.context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_what_is_no_certificate_with_its_key_is_refused(pair: Pair, tmp_path: Path) -> None:
    cert, key = pair
    other_cert, other_key = another(tmp_path)
    assert "tls.key: it is not the key of the certificate in" in refusal_of(cert, other_key)
    assert refusal_of(tmp_path / "none", key).endswith("none: No such file or directory")
    assert "no certificate in PEM form in it, but a private key: is it the file of --tls-key?" in refusal_of(key, cert)
    plain = tmp_path / "plain"
    plain.touch(0o600)
    assert "no private key in PEM form" in refusal_of(cert, plain)
    secret = tmp_path / "secret.key"
    openssl("pkcs8", "-topk8", "-in", key, "-passout", "pass:word", "-out", secret)
    assert "needs a passphrase" in refusal_of(cert, secret)
    other_cert.write_text("-----BEGIN CERTIFICATE-----\nhalf")
    assert "OpenSSL refuses it" in refusal_of(other_cert, other_key)
    openssl("ecparam", "-name", "secp256k1", "-genkey", "-noout", "-out", other_key)
    openssl("req", "-x509", "-new", "-key", other_key, "-subj", "/CN=localhost", "-out", other_cert)
    assert "NO_SHARED_CIPHER" in refusal_of(other_cert, other_key), "no client can use it"


def test_a_file_that_goes_while_it_is_read_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "read_file", gone_after(certificate.read_file))
    assert refusal_of(*pair).endswith("No such file or directory")


def gone_after(read: Callable[..., bytes]) -> Callable[..., bytes]:
    def read_and_remove(path: str, flag: str, **how: bool) -> bytes:
        data = read(path, flag, **how)
        Path(path).unlink()
        return data

    return read_and_remove


@pytest.mark.parametrize(("mode", "is_taken"), [(0o600, True), (0o640, True), (0o644, False), (0o660, False)])
def test_a_key_that_others_may_read_is_refused(pair: Pair, mode: int, is_taken: bool) -> None:
    pair[1].chmod(mode)
    if is_taken:
        assert load_certificate(*map(str, pair)).until
    else:
        assert f"open to others (mode {mode:o}): chmod" in refusal_of(*pair)


class Following:
    def __init__(self, pair: Pair) -> None:
        self.told = io.StringIO()
        self.certificate = Certificate(str(pair[0]), str(pair[1]), Logger("r", self.told))

    def look(self) -> ssl.SSLContext:
        self.certificate.take_news(*self.certificate.look())
        return self.certificate.context

    def count(self, words: str) -> int:
        return self.told.getvalue().count(words)


def test_changed_files_make_a_new_context_and_bad_ones_none(pair: Pair) -> None:
    following = Following(pair)
    first = following.certificate.context
    assert following.look() is first and following.count("again") == 0
    pair[0].write_text("")
    assert following.look() is first and following.look() is first
    assert following.count("the TLS certificate stays as it was") == 1
    make_certificate(pair[0].parent)
    second = following.look()
    assert second is not first and following.look() is second
    assert following.count("the TLS certificate was read again until=20") == 1


def test_an_expired_certificate_is_served_with_a_warning(pair: Pair) -> None:
    expire(pair)
    following = Following(pair)
    following.certificate.warn(0.0)
    assert following.count('clients will refuse the TLS certificate why="certificate has expired"') == 1


def test_the_end_is_a_metric_that_follows_the_files(pair: Pair) -> None:
    following, registry = Following(pair), CollectorRegistry()
    show_expiry(registry, following.certificate.until)

    def shown() -> float | None:
        return registry.get_sample_value("baton_tls_expiry_timestamp_seconds")

    assert shown() == load_certificate(*map(str, pair)).until > 0
    expire(pair)
    following.look()
    assert shown() == 0, "an alarm that waits for the end sees that it has come"


def test_the_end_is_announced_once_a_day(pair: Pair) -> None:
    following = Following(pair)  # two days are left
    until = load_certificate(*map(str, pair)).until
    following.certificate.warn(until - SOON_S + 1)
    assert following.count("the TLS certificate expires soon") == 1
    following.certificate.warn(until + 1)
    following.certificate.warn(until + 2)
    assert following.count("clients will refuse the TLS certificate") == 1
    make_certificate(pair[0].parent)
    following.look()
    following.certificate.warn(until - 2 * SOON_S)
    assert (following.count("refuse"), following.count("soon")) == (1, 1)
    following.certificate.warn(until + SOON_S)
    assert following.count("refuse") == 2, "of the new one nothing was told yet"


class Ready(QuietHandler):
    def do_GET(self) -> None:
        self.say(200, b'{"nodes": [{"ready": true}]}')


class QuietServer(HTTPServer):
    def handle_error(self, *_: object) -> None:
        """The client refuses a certificate on purpose."""


def test_a_launcher_knows_its_router_by_the_certificate(pair: Pair, tmp_path: Path) -> None:
    """It may be for another name, or be too old; but no other certificate will do."""
    other, _ = another(tmp_path)
    expire(pair)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    server = QuietServer(("127.0.0.1", 0), Ready)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with serving(server):
        port = server.server_port
        assert is_ready("127.0.0.1", port, 1, cert=str(pair[0]))
        assert not is_ready("127.0.0.1", port, 1, cert=str(other))
        assert not is_ready("127.0.0.1", port, 1, cert=str(tmp_path / "none.crt")) and not is_ready(
            "127.0.0.1", port, 1, cert=str(pair[1])
        )
        connection: http.client.HTTPConnection = own_connection("127.0.0.1", port, str(other), HANG_GUARD_S)
        with pytest.raises(ssl.SSLCertVerificationError):
            connection.request("GET", "/ready")
