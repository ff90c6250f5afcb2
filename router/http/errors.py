"""The API's errors, and their JSON in OpenAI's, Anthropic's or Ollama's form."""

from __future__ import annotations

import math

import msgspec

from shared.core.errors import BatonError, InvalidRequest

RETRYABLE = (429, 503)
MESSAGES_PATH = "/v1/messages"
OLLAMA_PATHS = "/api/"
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}  # by status
ACCEPTED_CODINGS = b"gzip, deflate, zstd"  # of request bodies
NO_THREADS = {"error_code": "thread_unsupported_request"}  # on this code SDKs send the whole conversation
JSON_TYPE = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The client has hung up."""


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    error: ErrorBody


class Unauthorized(InvalidRequest, code="invalid_api_key", status=401): ...


class AdminIsOff(InvalidRequest, code="admin_is_off", status=403): ...


class MissingRight(InvalidRequest, code="missing_right", status=403):
    """The operator's key is known, but may not do this."""


class PromptTooLong(InvalidRequest, code="context_length_exceeded"):
    """Agents shorten their conversation when they see this code or message."""


class UnknownNode(InvalidRequest, code="unknown_node", status=404): ...


class Conflict(InvalidRequest, code="conflict", status=409): ...


class NotFound(InvalidRequest, code="not_found", status=404): ...


class MethodNotAllowed(InvalidRequest, code="method_not_allowed", status=405):
    """`allowed`: the methods that the path has, as the header Allow lists them."""

    def __init__(self, message: str, allowed: bytes) -> None:
        super().__init__(message)
        self.allowed = allowed


class NoWebSockets(InvalidRequest, code="no_websockets", status=426):
    """A client that asks for a WebSocket takes this answer as a reason to go on over HTTP at once."""


class NamedRefusal(InvalidRequest):
    """Its message begins with its code: Anthropic's form has no field for a code."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{self.code}: {why}")


class UnknownStream(NamedRefusal, code="unknown_stream"):
    """No router with this key began the stream that Last-Event-ID names."""


class ResumeMismatch(NamedRefusal, code="resume_mismatch", status=422):
    """The resumed request or its tokens differ from the broken stream's. Clients don't retry this status."""


class KeyReused(NamedRefusal, code="idempotency_key_reused", status=422): ...


class BodyTimeout(InvalidRequest, code="body_timeout", status=408): ...


class BadHttp(InvalidRequest, code="bad_http"): ...


class HeadersTooLarge(InvalidRequest, code="headers_too_large", status=431): ...


class HeaderTimeout(InvalidRequest, code="header_timeout", status=408): ...


class TlsTimeout(InvalidRequest, code="tls_timeout"): ...


class TlsFailed(InvalidRequest, code="tls_failed"): ...


class PlainHttp(InvalidRequest, code="plain_http"):
    """HTTP without TLS came to a port with TLS."""


class HostNotAllowed(InvalidRequest, code="host_not_allowed", status=421):
    """Another site's host name may point at this server (DNS rebinding)."""


class MediaTypeRefused(InvalidRequest, code="unsupported_media_type", status=415): ...


class CodingRefused(InvalidRequest, code="unsupported_content_encoding", status=415):
    """The body has a Content-Encoding that is not served."""


class TargetTooLong(InvalidRequest, code="target_too_long", status=414): ...


class NotImplementedHere(BatonError, code="not_implemented", status=501): ...


class VersionNotSupported(BatonError, code="http_version_not_supported", status=505): ...


class TooManyConnections(BatonError, code="too_many_connections", status=503): ...


class BodiesFull(BatonError, code="bodies_full", status=503): ...


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(path: str, error: BatonError, request_id: str) -> bytes:
    if path.startswith(OLLAMA_PATHS):
        return ollama_error_json(error)
    if is_messages(path):
        return msgspec.json.encode(messages_error(error) | {"request_id": request_id})
    return error_json(error)


def is_messages(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def messages_error(error: BatonError) -> dict[str, object]:
    kind = MESSAGES_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    described: dict[str, object] = {"type": kind, "message": error.message}
    if isinstance(error, InvalidRequest) and error.param == "thread":
        described["details"] = NO_THREADS
    return {"type": "error", "error": described}


def error_json(error: BatonError) -> bytes:
    param = error.param if isinstance(error, InvalidRequest) else None
    body = ErrorBody(message=error.message, type=error_type(error.status), param=param, code=error.code)
    return msgspec.json.encode(ErrorAnswer(body))


def ollama_error_json(error: BatonError) -> bytes:
    return msgspec.json.encode({"error": error.message})


def internal_error() -> BatonError:
    """Return an error without its cause: the log has the exception."""
    return BatonError("the server failed on this request")


def whole(seconds: float, per_second: int) -> int:
    """Convert a wait to whole units, rounded up."""
    return max(1, math.ceil((seconds - 1e-6) * per_second))


def error_headers(error: BatonError, retry_after_s: int) -> list[tuple[bytes, bytes]]:
    headers = [JSON_TYPE]
    if error.status in RETRYABLE:
        known_s = error.retry_after_s
        headers.append((b"retry-after", str(retry_after_s if known_s is None else whole(known_s, 1)).encode()))
        if known_s is not None:  # OpenAI's clients prefer this header
            headers.append((b"retry-after-ms", str(whole(known_s, 1000)).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed))
    if isinstance(error, NoWebSockets):
        headers += [(b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade")]
    if isinstance(error, CodingRefused):
        headers.append((b"accept-encoding", ACCEPTED_CODINGS))
    return headers
