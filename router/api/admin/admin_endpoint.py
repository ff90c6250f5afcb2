"""Endpoints of /admin: the key must have the right, and each call makes a line in the log.

Tools ask for the status many times a second, and anyone may try keys, so these lines are limited; the next line of the
kind has the number of the others. Each change that a key with the right asks for has its own line.
"""

from __future__ import annotations

from router.api.endpoint import Endpoint, EndpointRules, Handler
from router.http.connection import Connection
from router.http.errors import MissingRight
from router.tenants.tenant import EVERYBODY, SEE
from shared.core.trace_context import traced
from shared.observe.log_once import LogOnce

READS = ("GET", "HEAD", "OPTIONS")
NOBODY = "none"  # instead of a key's name
REFUSED_LINES = 10  # in a minute, about calls without a known key


class AdminEndpoint(Endpoint):
    """`right`: what a call needs that does not only read."""

    def __init__(self, rules: EndpointRules, method: str, handler: Handler, right: str) -> None:
        super().__init__(rules, method, handler, needs_key=True)
        self._right = right
        self._reads = LogOnce(rules.log)
        self._refused = LogOnce(rules.log, lines=REFUSED_LINES)

    def _admit(self, connection: Connection) -> None:
        super()._admit(connection)
        right, operator = self._right_for(connection), connection.tenant
        if right not in operator.rights:
            has = ", ".join(operator.rights)
            raise MissingRight(
                f"the admin key {operator.name!r} has the rights {has}; {call_of(connection)} needs the right {right}"
            )

    def _right_for(self, connection: Connection) -> str:
        return SEE if connection.scope["method"] in READS else self._right

    def _exchange_over(self, connection: Connection) -> None:
        """Write who called from where, what for, and the answer's status; None for a client that left before."""
        is_known = connection.tenant is not EVERYBODY
        key = connection.tenant.name if is_known else NOBODY
        address, forwarded = (connection.scope.get("client") or ("",))[0], connection.header(b"x-forwarded-for")
        call, status = call_of(connection), connection.status
        fields: dict[str, object] = {"key": key, "address": address, "call": call, "status": status}
        if forwarded is not None:
            fields["forwarded_for"] = forwarded  # as the client or a proxy says
        fields |= {"request": connection.request_id, **traced(connection.trace), **connection.subject}
        if not is_known and status is not None and status >= 400:
            self._refused.warning("refused", "admin call", **fields)
        elif status == MissingRight.status or self._right_for(connection) == SEE:
            self._reads.info((key, address, connection.scope["method"], status), "admin call", **fields)
        else:
            self._rules.log.info("admin call", **fields)


def call_of(connection: Connection) -> str:
    return f"{connection.scope['method']} {connection.scope['path']}"
