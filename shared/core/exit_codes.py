"""What a node's exit status tells whoever started it: how a drained node wants to go on."""

from __future__ import annotations

EXIT_DRAINED = 10  # stays down on purpose
_AGAIN = {11: "restart", 12: "prefill", 13: "decode"}


def exit_code_after(then: str) -> int:
    """`then` as in the Drain message."""
    codes = {word: code for code, word in _AGAIN.items()}
    return codes.get(then, EXIT_DRAINED)


def start_again_as(code: int, role: str) -> str | None:
    """The role to start again with after a node of this role ended with `code`; None: not at all."""
    word = _AGAIN.get(code)
    return role if word == "restart" else word
