"""Parse a router's address from a command's last argument or --url. Uses no network."""

from __future__ import annotations

import argparse
import ssl
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.core.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
USUAL = f"default: {DEFAULT_URL}"
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Url:
    scheme: str
    host: str
    port: int
    prefix: str  # the path without /v1

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


def parse_url(text: str) -> Url:
    """Read http(s)://host[:port][/path], or host:port. The path may end with /v1."""
    try:
        parts = urllib.parse.urlsplit(text if "//" in text else f"http://{text}")
        port = parts.port or (PORTS.get(parts.scheme, 0) if "//" in text else 0)
    except ValueError:
        raise not_a_url(text) from None
    if parts.scheme not in PORTS or not parts.hostname or not port:
        raise not_a_url(text)
    return Url(parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))


def not_a_url(text: str) -> ConfigError:
    return ConfigError(f"--url: {text!r} is not a server's address; it must look like {DEFAULT_URL}")


def no_answer(url: Url, error: Exception) -> ConfigError:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = f"its certificate is not trusted ({error.verify_message})"
        return ConfigError(f"no answer from {url}: {why}; --ca FILE names the CA of your own certificates")
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return ConfigError(f"no answer from {url}: it does not speak TLS; try http://{url.authority}")
    return ConfigError(f"no answer from {url}: {error}; is a server running there?")


def add_url(parser: Any, without: str = USUAL) -> None:
    """Take the URL as the last argument or as --url. `without`: help text on what happens without a URL."""
    add_url_word(parser, without)
    add_url_flag(parser)


def add_url_word(parser: Any, without: str = USUAL) -> None:
    parser.add_argument("address", nargs="?", metavar="URL", help=f"the router, or its proxy ({without})")


def add_url_flag(parser: Any, dest: str = "url") -> None:
    parser.add_argument("--url", dest=dest, metavar="URL", help="the same as the argument URL")


def url_of(args: argparse.Namespace) -> Url | None:
    return the_only(args.address, args.url)


def the_only(*texts: str | None) -> Url | None:
    """Return the address in `texts`, which may repeat it; None without one.

    Raise ConfigError if addresses differ.
    """
    found = [parse_url(text) for text in texts if text is not None]
    for other in found[1:]:
        require_same(found[:1], [other])
    return found[0] if found else None


def all_of(words: Sequence[str], flags: Sequence[str]) -> list[Url]:
    """Return a command's addresses. Raise ConfigError if its arguments and --url differ."""
    by_word, by_flag = list(map(parse_url, words)), list(map(parse_url, flags))
    if by_word and by_flag:
        require_same(by_word, by_flag)
    return by_word or by_flag


def require_same(first: Sequence[Url], second: Sequence[Url]) -> None:
    if first != second:
        one, other = (" ".join(map(str, urls)) for urls in (first, second))
        raise ConfigError(f"the URL is given twice, as {one} and as {other}; give it once, as a word or with --url")
