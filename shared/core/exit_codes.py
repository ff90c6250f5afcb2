"""A drained node's exit codes tell its parent whether, and in which role, to restart the node."""

from __future__ import annotations

EXIT_DRAINED = 10  # no restart
_AGAIN = {11: "restart", 12: "prefill", 13: "decode"}


def exit_code_after(then: str) -> int:
    """`then`: a word in the Drain message."""
    codes = {word: code for code, word in _AGAIN.items()}
    return codes.get(then, EXIT_DRAINED)


def start_again_as(code: int, role: str) -> str | None:
    """Return the role for a restart, or None. `role`: the former role."""
    word = _AGAIN.get(code)
    return role if word == "restart" else word
