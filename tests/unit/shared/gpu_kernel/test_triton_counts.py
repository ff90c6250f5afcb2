"""What a decode step on a GPU launches and moves, counted for the shape of an 8B model."""

from __future__ import annotations

import pytest

from tests.support.kernels import ahead

pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
from shared.model.math.kernels import Formats  # noqa: E402
from tests.support.gpus.gpu_counts import COUNTED, attention_programs, count_layer, count_step, counted, llama  # noqa: E402
from tests.support.kernels.step_code import launches_of_layer  # noqa: E402

MOST_LAUNCHES, MOST_MOVED = 9, 1.15
SHORT = 128  # keys that are not split


def test_a_layer_has_nine_launches() -> None:
    launches = count_layer(64, SHORT).launches
    print(dict(launches))
    assert launches["linear"] == 4 and launches.total() <= MOST_LAUNCHES


def test_few_programs_of_a_graph_have_no_keys() -> None:
    """At most 0.2 of those that have some, for 256 rows of 512 tokens; for other lengths less than twice as many."""
    busy_and_idle = {context: attention_programs(256, context) for context in (512, 256, 700, 2048, 4096, 8192)}
    shares = [idle / busy for busy, idle in busy_and_idle.values()]
    assert shares[0] <= 0.2 and max(shares) < 2, busy_and_idle


@pytest.mark.parametrize(
    ("batch", "context", "weights"),
    [(batch, context, weights) for weights in ("auto", "fp8") for batch, context in COUNTED],
)
def test_a_step_moves_little_but_weights_and_kv(batch: int, context: int, weights: str) -> None:
    count = count_step(llama(32), batch, context, Formats(weights=weights))
    ratio = count.bytes / count.ideal
    told = f"{count.bytes / 1e9:.2f} GB, ideally {count.ideal / 1e9:.2f}, {ratio:.3f} times"
    print(f"batch {batch} behind {context}, weights {weights}: {told}")
    assert 1 <= ratio <= MOST_MOVED


def test_weights_in_bytes_cost_one_launch_less() -> None:
    """Their product of gate and up gates as well."""
    launches = count_layer(64, SHORT, Formats(weights="fp8")).launches
    assert launches["product_kernel"] == 4 and launches.total() <= MOST_LAUNCHES - 1


def test_the_page_has_these_figures() -> None:
    """Written by tests.support.kernels.ahead, which CONTRIBUTING.md names."""
    assert counted() in (ahead.ROOT / "docs" / "gpu-kernels.md").read_text()


def test_the_page_counts_the_code_of_what_a_layer_launches() -> None:
    page = (ahead.ROOT / "docs" / "gpu-kernels.md").read_text()
    for batch, context in COUNTED:
        for (signature, programs), launches in launches_of_layer(batch, context).items():
            name = signature.kernel.partition(":")[2]
            row = f"| {batch} | {context:,} | {name} | {launches} | {programs:,} | {signature.num_warps} |"
            assert row in page, f"run python -m tests.support.kernels.step_code: {row}"
