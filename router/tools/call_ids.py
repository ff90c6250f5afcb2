"""Make ids of tool calls: the same on any node and after any retry."""

from __future__ import annotations

from hashlib import blake2b

LONG_BYTES = 12  # 24 hex digits
SHORT_CHARS = 9  # Mistral's templates require exactly nine letters and digits


def call_id(request_id: str, call: int, *, choice: int = 0, is_short: bool = False) -> str:
    """`is_short`: see `ToolFormat.has_short_ids`."""
    spelled = f"{choice}:{call}:{request_id}".encode("utf-8", "surrogatepass")
    digest = blake2b(spelled, digest_size=LONG_BYTES).hexdigest()
    return digest[:SHORT_CHARS] if is_short else f"call_{digest}"
