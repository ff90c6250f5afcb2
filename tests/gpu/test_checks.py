"""The checks of `make test-gpu`, one process each, as tests: where there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.book import PASSED, SKIPPED
from tests.gpu.plan import Check, checks_of
from tests.gpu.run import Process


@pytest.mark.parametrize("check", checks_of("test"), ids=lambda check: check.name)
def test_on_a_gpu(check: Check, tmp_path: Path) -> None:
    outcome = Process("cuda", tmp_path / "log.txt", None)(check)
    if outcome.state == SKIPPED:
        pytest.skip(outcome.told)
    assert outcome.state == PASSED, outcome.told
