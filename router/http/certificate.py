"""The TLS certificate of the HTTP API: its files, their checks, and what becomes of files that change.

files --read on a thread; changed?--> a new context, for new connections --> open connections keep theirs
                             unusable: one line in the log, and the last context stays
"""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from shared.core.errors import ConfigError
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce

CERT_FLAG, KEY_FLAG = "--tls-cert", "--tls-key"
FOLLOW_S = 1.0
SOON_S = 7 * 86400.0  # an expiry that is nearer than this is announced
AGAIN_S = 86400.0  # between two such lines
MAX_FILE_BYTES = 1 << 20
OTHERS = 0o037  # what a key file must not allow: the group may read it, as in Kubernetes or Debian's group ssl-cert
PEM_CERT, PEM_KEY = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----"


@dataclass(frozen=True, slots=True)
class LoadedCertificate:
    """`doubt`: why clients will refuse the certificate now; "" if OpenSSL finds no reason. `until`: the time at which
    it expires; 0 if there is a doubt."""

    files: tuple[bytes, bytes]
    context: ssl.SSLContext
    doubt: str
    until: float


def load_certificate(cert: str, key: str) -> LoadedCertificate:
    """Raise ConfigError unless the files hold a certificate and its key."""
    certificates = read_file(cert, CERT_FLAG)
    if PEM_CERT not in certificates:  # said first: if the two are exchanged, the key seems to be open to others
        hint = f", but a private key: is it the file of {KEY_FLAG}?" if PEM_KEY in certificates else ""
        raise ConfigError(f"{CERT_FLAG} {cert}: there is no certificate in PEM form in it{hint}")
    files = (certificates, read_file(key, KEY_FLAG, is_secret=True))
    if PEM_KEY not in files[1]:
        raise ConfigError(f"{KEY_FLAG} {key}: there is no private key in PEM form in it")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(path_of(cert), path_of(key), password=lambda: "")  # else OpenSSL asks at the terminal
        seen = look_as_a_client(context, path_of(cert))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{KEY_FLAG} {key}: it is not the key of the certificate in {cert}") from None
        if b"ENCRYPTED" in files[1]:
            raise ConfigError(f"{KEY_FLAG} {key}: it needs a passphrase; give a key without one") from None
        raise ConfigError(f"{CERT_FLAG} {cert}: OpenSSL refuses it with {key}: {error.reason or error}") from None
    except OSError as error:  # a file has gone since it was read
        raise ConfigError(f"{CERT_FLAG} {cert}, {KEY_FLAG} {key}: {error.strerror}") from None
    return LoadedCertificate(files, context, *seen)


def path_of(path: str) -> Path:
    return Path(path).expanduser()


def read_file(path: str, flag: str, *, is_secret: bool = False) -> bytes:
    try:
        with path_of(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if is_secret and mode & OTHERS:
        raise ConfigError(f"{flag} {path} is open to others (mode {mode:o}): chmod 640 or 600 {path}")
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{flag} {path} is larger than {MAX_FILE_BYTES} bytes")
    return data


def look_as_a_client(server: ssl.SSLContext, cert: Path) -> tuple[str, float]:
    """Return (doubt, until) of `LoadedCertificate`. Raise SSLError if no handshake is possible, e.g. for its curve.

    A client that trusts this certificate shakes hands in memory, because the standard library reads a certificate's
    dates only of a peer."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    is_done = False
    while not is_done:
        is_done = True
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                is_done = False
            except ssl.SSLCertVerificationError as error:
                return error.verify_message, 0.0
    found = ends[0].getpeercert()
    assert found is not None
    return "", ssl.cert_time_to_seconds(str(found["notAfter"]))


def show_expiry(registry: CollectorRegistry, until: Callable[[], float]) -> None:
    """Make the metric by which people see when the certificate expires."""
    help = "When the certificate of the HTTP API expires, in seconds since 1970; 0: clients refuse it now"
    Gauge("baton_tls_expiry_timestamp_seconds", help, registry=registry).set_function(until)


class Certificate:
    """`context`: for the next connection. Owned by the event loop; `look` may block, so it runs on a thread."""

    def __init__(self, cert: str, key: str, log: Logger) -> None:
        """Raise ConfigError as `load_certificate`."""
        self._paths = (cert, key)
        self._log = log
        self._daily = LogOnce(log, interval_s=AGAIN_S)
        self._complaint = ""
        self._now = load_certificate(cert, key)
        self.warn(time.time())

    @property
    def context(self) -> ssl.SSLContext:
        return self._now.context

    def until(self) -> float:
        return self._now.until

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            self.take_news(*await asyncio.to_thread(self.look))
            self.warn(time.time())

    def look(self) -> tuple[LoadedCertificate, str]:
        """Return what holds from now on, and why the files can't be used, if so."""
        cert, key = self._paths
        try:
            files = (read_file(cert, CERT_FLAG), read_file(key, KEY_FLAG, is_secret=True))
            return self._now if files == self._now.files else load_certificate(cert, key), ""
        except ConfigError as error:
            return self._now, error.message

    def take_news(self, found: LoadedCertificate, complaint: str) -> None:
        if complaint and complaint != self._complaint:
            self._log.warning("the TLS certificate stays as it was", why=complaint)
        self._complaint = complaint
        if found is not self._now:
            self._now = found
            self._daily = LogOnce(self._log, interval_s=AGAIN_S)
            self._log.info("the TLS certificate was read again", until=shown_time(found.until))

    def warn(self, now: float) -> None:
        doubt, until = self._now.doubt, self._now.until
        doubt = doubt or ("certificate has expired" if now > until else "")
        if doubt:
            self._daily.warning("doubt", "clients will refuse the TLS certificate", why=doubt)
        elif until - now < SOON_S:
            self._daily.warning("soon", "the TLS certificate expires soon", until=shown_time(until))


def shown_time(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)) if at else "unknown"
