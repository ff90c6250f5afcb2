"""What the host does for a decode step that has a graph: the page's figures, whatever is sampled."""

from __future__ import annotations

import pytest

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
from tests.support.kernels import ahead, host_work  # noqa: E402

FIRST = "penalties, bias"  # the others take a core each


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == FIRST else [pytest.mark.long]) for name in host_work.WAYS]
)
def test_a_step_is_one_copy_each_way_a_replay_and_few_launches(name: str) -> None:
    row = host_work.row_of(name)
    print(row)
    assert row in (ahead.ROOT / "docs" / "gpu-kernels.md").read_text()
    assert row.startswith(f"| {name} | 1 | 1 |") and row.endswith("| 1 |")
