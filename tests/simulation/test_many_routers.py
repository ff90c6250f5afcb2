"""Three routers over the same nodes: what one of them does not see of the others must fill no node."""

from __future__ import annotations

import pytest

from tests.support.worlds.many_routers import Traffic, figures

SEEDS = range(2)


@pytest.mark.parametrize("policy", ["least_load", "prefix_aware"])
@pytest.mark.parametrize(
    "traffic",
    [Traffic(12.0, 60.0), Traffic(40.0, 30.0, prompt_tokens=100), Traffic(40.0, 20.0, prompt_tokens=100, decode_s=0.5)],
    ids=["seconds long", "many", "short"],
)
def test_no_node_gets_much_more_than_its_share(policy: str, traffic: Traffic) -> None:
    """One router that sees all had 0.7 to 1.0 sequences beyond the mean on its fullest node. Three that saw only
    their own between two heartbeats had 2.2 to 6.0."""
    alone, _ = figures(policy, 1, traffic, SEEDS)
    together, _ = figures(policy, 3, traffic, SEEDS)
    assert together <= 1.9 * alone


def test_routers_without_work_change_nothing() -> None:
    traffic = Traffic(12.0, 60.0, shares=(1.0, 0.0, 0.0))
    assert figures("least_load", 3, traffic, SEEDS) == figures("least_load", 1, traffic, SEEDS)
