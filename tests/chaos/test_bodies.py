"""A few thousand mutated bodies; `make bodies` is the long run."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.bodies import send_all

NUM_BODIES = 4000
SEED = 1


def test_no_body_is_answered_with_a_server_error(tmp_path: Path) -> None:
    assert send_all(tmp_path, SEED, range(NUM_BODIES)) == []
