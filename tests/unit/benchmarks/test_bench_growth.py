"""What the bench of `--growth-reserve` finds, with today's default."""

from __future__ import annotations

import pytest

from benchmarks.layouts.growth import study, thrash
from shared.config.settings.settings import SchedConfig


@pytest.mark.rule("La")
def test_streams_that_began_go_on() -> None:
    """A full pool, and nobody knows the lengths of the 128 answers."""
    today, now = study(thrash(), 0.0), study(thrash(), SchedConfig().growth_reserve)
    assert today.paused_share > 0.4 and today.prompt_share > 2.0, "the load is too easy to show anything"
    assert now.paused_share <= 0.05
    assert now.prompt_share <= 1.3
    assert now.steps <= 1.25 * today.steps
