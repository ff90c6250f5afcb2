"""One cluster for all tests here that can share it: to start five processes costs more than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clusters.chaos_cluster import ChaosCluster, chaos_cluster

SLOW_READER_S = 2.0


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[ChaosCluster]:
    flags = ("--slow-reader-s", str(SLOW_READER_S))
    carrier = pytestconfig.getoption("--transport")
    node_flags = ("--transport", carrier) if carrier else ()
    with chaos_cluster(tmp_path_factory.mktemp("chaos"), router_flags=flags, node_flags=node_flags) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: ChaosCluster) -> Iterator[ChaosCluster]:
    """Everyone alive before, everything back in its place afterwards."""
    shared_cluster.heal()
    yield shared_cluster
    shared_cluster.heal()
    shared_cluster.check_whole()
