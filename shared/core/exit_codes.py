"""A process's exit codes tell its parent whether to restart it, and a drained node in which role."""

from __future__ import annotations

EXIT_CONFIG = 2  # an unusable configuration: a restart would not help
EXIT_DRAINED = 10  # don't restart the node
_AGAIN = {11: "restart", 12: "prefill", 13: "decode"}


def exit_code_after(then: str) -> int:
    """Return the exit code for `then`, a word in the Drain message."""
    codes = {word: code for code, word in _AGAIN.items()}
    return codes.get(then, EXIT_DRAINED)


def start_again_as(code: int, role: str) -> str | None:
    """Return the role in which to restart the node, if any. `role`: the former role."""
    word = _AGAIN.get(code)
    return role if word == "restart" else word
