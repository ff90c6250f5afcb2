"""Weights are prefetched to the cache that suits the processor."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from shared.kernel.product.block_product import make_task
from shared.kernel.product.dot import Dot
from shared.model.formats.gguf_blocks import Q4_1
from tests.support.machine.processors import run_python

LINES = 20  # of 64 bytes, in a block of a tile


def prefetches() -> dict[str, int]:
    """Compile the product of 4-bit weights, which has a loop each for one to four rows."""
    task = make_task(Q4_1, is_half=True, out_half=True, dot=Dot.PAIRS, has_amx=False)
    return dict(Counter(re.findall(r"prefetch\w+", task._library.get_asm_str())))


@pytest.mark.parametrize(
    ("processor", "wanted"), [("haswell", {"prefetcht0": 4 * LINES}), ("znver3", {"prefetcht1": 3 * LINES})]
)
def test_a_zen_prefetches_to_its_second_cache(processor: str, wanted: dict[str, int], tmp_path: Path) -> None:
    """With one row, a Zen leaves 4-bit weights to its own prefetcher."""
    there = run_python(processor, tmp_path, "-c", f"from {__name__} import prefetches; print(prefetches())")
    assert there.stdout.strip() == repr(wanted), there.stderr
