"""Static pages without outside resources: the playground at `/`, and `/status`.

The page `/status` holds no state itself. It asks /admin/status, with the admin key that its user types in."""

from __future__ import annotations

from importlib.resources import files

from router.http.connection import Connection

PAGE_HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]


class StaticPage:
    def __init__(self, name: str) -> None:
        self._page = files("router").joinpath("static", name).read_bytes()

    async def page(self, connection: Connection) -> None:
        await connection.answer(200, self._page, PAGE_HEADERS)
