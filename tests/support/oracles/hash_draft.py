"""How many drafts of HashDraft a verify step accepts."""

from __future__ import annotations

from shared.model.hashlm.draft import is_hit


def expected_accept_len(committed: int, width: int, hit_rate: int) -> int:
    """Return a verify step's acceptance length: the number of leading hits, plus 1 for the bonus token."""
    accepted = 1
    while accepted < width and is_hit(committed + accepted, hit_rate):
        accepted += 1
    return accepted
