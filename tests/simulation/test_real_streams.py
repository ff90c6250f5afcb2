"""Whole streams of tiny random networks on Baton's own kernels, by seed: {llama, qwen2, qwen3, experts, windows} x
{no drafts, n-gram, chain, tree, copies, adaptive} x grammars x sampling x n x adapters x pools that are too small x
formats, through a prefill and a decode node. Tokens, log-probabilities and ends are those of the same request alone on
a plain node. Exact.

`--long` runs 500 streams and demands that each thing happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from shared.core.sampling_params import PARAMETERS
from shared.kernel.product.product import supports
from tests.support.cores.real_streams import SPECS, Site, Went, run_streams

NUM_REQUESTS = 8  # at one time; they have about two streams each
FEW_SEEDS, MANY_SEEDS = range(1, 4), range(35)
EVER = (
    "cached prompt tokens",
    "greedy requests",
    "hand-offs",
    "masked rows",
    "mixed steps",
    "pages evicted",
    "requests with an adapter",
    "retractions forced",
    "rows with adapters",
    "steps with and without adapters",
)
OFTEN = (
    *EVER,
    "readmissions",
    "restored pages",
    "retractions",
    "rows with forced drafts",
    "widths that an adaptive choice changed",
    *(f"drafts accepted, {spec}" for spec in SPECS if spec != "none"),
    *(f"requests with n = {number}" for number in range(1, 5)),
    *(f"requests with {one.name}" for one in PARAMETERS if one.neutral is not None),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if not supports(128, torch.float32):
        pytest.skip("without own kernels, sums may have another order in a longer step")
    torch.set_num_threads(1)
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.close()


def run_all(seeds: range, site: Site) -> Went:
    went = Went()
    for seed in seeds:
        try:
            run_streams(seed, NUM_REQUESTS, site, went)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return went


def test_streams_are_those_of_requests_alone(site: Site, figures: Callable[[str], None]) -> None:
    went = run_all(FEW_SEEDS, site)
    figures(f"real streams: {went}")
    assert not [name for name in EVER if not went.counts[name]]


def test_scores_come_although_grants_are_retracted(site: Site) -> None:
    """Seed 17: a grant of a prompt with scores is among those that might be retracted."""
    run_all(range(17, 18), site)


@pytest.mark.long
def test_500_streams_are_those_of_requests_alone(site: Site, figures: Callable[[str], None]) -> None:
    went = run_all(MANY_SEEDS, site)
    figures(f"real streams: {went}")
    assert not [name for name in OFTEN if not went.counts[name]]
    assert went.counts["streams"] >= 500
