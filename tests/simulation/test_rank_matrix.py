"""Streams do not show how many ranks a node has, nor what carried the pages: {shm, zmq, gloo} x {1, 2, 4 ranks that
prefill} x {1, 2, 4 that decode} x {no drafts, n-gram, chain, tree} x {retraction} x {cold tier} x {pages whole, in
parts} x {streams} x {greedy, seeded}, on HashLM and on a random Llama of 8 query and 4 KV heads. Exact.

Every pair of values occurs; with --all-ranks every transport meets every two numbers of ranks.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from shared.kernel.product.product import supports
from shared.node.loop.node import Node
from shared.wire.messages import Ready
from tests.support.cores.rank_cells import (
    AXES,
    HashKind,
    Kind,
    LlamaKind,
    RankCell,
    all_cells,
    all_pairs,
    run_cell,
    some_cells,
)
from tests.support.worlds.node_pair import Net

SEEDS = {"hashlm": 1, "llama": 2}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return {"hashlm": HashKind(), "llama": LlamaKind(tmp_path_factory.mktemp("llama"))}


@pytest.fixture(scope="module")
def goldens() -> dict[tuple[str, float], list[list[int]]]:
    return {}


@pytest.fixture(scope="module")
def went() -> Counter[str]:
    """What happened in all cells together."""
    return Counter()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        draw = all_cells if metafunc.config.getoption("--all-ranks") else some_cells
        cells = [(kind, cell) for kind, seed in SEEDS.items() for cell in draw(seed)]
        metafunc.parametrize(("kind", "cell"), cells, ids=str)


def test_streams_are_those_of_one_rank(
    kinds: dict[str, Kind], goldens: dict, went: Counter[str], kind: str, cell: RankCell
) -> None:
    if kind == "llama" and not supports(128, torch.float32):
        pytest.skip("the library's products may sum in another order when they have fewer columns")
    made = kinds[kind]
    golden = goldens.setdefault((kind, cell.temperature), made.expected(made.jobs(cell.temperature)))

    def watch(net: Net, prefill: Node, decode: Node) -> None:
        counts = decode.ctx.metrics.counters()
        assert counts["handoffs"] >= 3
        went.update({"handoffs": counts["handoffs"]})
        parts = [one for one in net.messages(Ready) if isinstance(one, Ready) and one.num_layers]
        assert bool(parts) == cell.in_parts

    assert run_cell(made, cell, watch) == golden
    assert len(set(map(tuple, golden))) > 3, "streams that can be told apart"


def test_every_pair_of_values_is_drawn() -> None:
    for seed in SEEDS.values():
        assert set().union(*(cell.pairs() for cell in some_cells(seed))) == all_pairs()
        assert len(all_cells(seed)) == len({(c.transport, c.prefill, c.decode) for c in all_cells(seed)}) == 27
    assert set(AXES["transport"]) == {"shm", "zmq", "gloo"}
