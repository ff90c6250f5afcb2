"""Long work says how much is done, and short work nothing."""

from __future__ import annotations

import logging

import pytest

from shared.model.math.progress import SAID_EVERY_S, with_progress


@pytest.mark.parametrize(("seconds_each", "told"), [(0.1, []), (1.0, ["30 %", "60 %", "90 %"]), (5.0, None)])
def test_the_share_is_told_every_few_seconds(caplog, seconds_each: float, told: list[str] | None) -> None:
    now = [0.0]
    with caplog.at_level(logging.INFO):
        for number, item in enumerate(with_progress(range(10), logging.getLogger("t"), "working", lambda: now[0])):
            assert item == number
            now[0] += seconds_each
    said = [record.getMessage() for record in caplog.records]
    wanted = [f"{10 * number} %" for number in range(1, 10)] if told is None else told
    assert said == [f"working: {share}" for share in wanted] and SAID_EVERY_S == 3.0
