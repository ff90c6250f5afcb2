"""One stream, however it ran. Every seed draws a cell of {overlap} x {chunk size} x {page size} x {disaggregated,
local, mixed} x {forced retraction} x {temperature} x {prefix cache} x {speculation: off, n-gram, chain, tree,
multi-layer} x {stream backend} x {host lengths} x {cold tier: off, memory, memory and a file} x {pipeline stages: 1,
2} x {grammar: none, JSON, regex, choice, tool}; all streams must be the plain reference's.

`--seeds 600` is the long run; the default is what continuous integration runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.cores.equivalence_cells import Watch, all_pairs, run_cell

BLOCK = 10  # seeds per test: a failing seed is named in the message
CI_SEEDS, CI_DECODE_STEPS = 120, 20_000
LONG_SEEDS, LONG_DECODE_STEPS = 600, 100_000


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "block" in metafunc.fixturenames:
        blocks = range(-(-metafunc.config.getoption("--seeds") // BLOCK))
        metafunc.parametrize("block", blocks)


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def cells() -> list:
    return []


@pytest.mark.rule("S10", "H13", "I5", "I8")
def test_streams_are_the_reference_s(block: int, watch: Watch, cells: list) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        try:
            cells.append(run_cell(seed, watch))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_every_pair_of_values_occurred_and_the_counts(
    watch: Watch, cells: list, figures: Callable[[str], None], pytestconfig: pytest.Config
) -> None:
    """Last, so that it sees what the others did."""
    num_seeds = pytestconfig.getoption("--seeds")
    if len(cells) < num_seeds or num_seeds < CI_SEEDS:
        pytest.skip("only the whole run can cover everything")
    covered = set().union(*(cell.pairs() for cell in cells))
    figures(
        f"equivalence: {len(cells)} seeds {dict(watch.outcomes)}, {watch.steps} steps, {watch.decode_steps} with "
        f"decode rows, {watch.verifies} verifies, {watch.retractions} forced retractions, "
        f"{watch.readmissions} re-admissions, {watch.restored_pages} pages restored, "
        f"{len(covered)} of {len(all_pairs())} pairs of values"
    )
    assert covered == all_pairs()
    assert watch.decode_steps >= (LONG_DECODE_STEPS if num_seeds >= LONG_SEEDS else CI_DECODE_STEPS)
    assert watch.verifies > 1000 and watch.retractions > 100
    assert watch.readmissions > 50 and watch.restored_pages > 500
