"""Make ids of tool calls: the same on any node and after any retry."""

from __future__ import annotations

from hashlib import blake2b

from router.tools.calls.format_row import CallIds

LONG_BYTES = 12  # 24 hex digits
SHORT_CHARS = 9  # Mistral's templates require exactly nine letters and digits


def call_id(request_id: str, call: int, *, choice: int = 0, kind: CallIds = CallIds.LONG, name: str = "") -> str:
    """`call`: the call's number, from the conversation's first call on if `kind` shows it. `name`: the function's."""
    if kind is CallIds.NAMED:
        return f"functions.{name}:{call}"
    spelled = f"{choice}:{call}:{request_id}".encode("utf-8", "surrogatepass")
    digest = blake2b(spelled, digest_size=LONG_BYTES).hexdigest()
    return digest[:SHORT_CHARS] if kind is CallIds.SHORT else f"call_{digest}"
