"""One site and one cluster for all scenarios, and their figures at the end. A machine that could run the drill and does
not fails it; one that can't make namespaces skips it, and says why."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drill.cluster import NODES, ROUTERS, URL, DrillCluster
from tests.drill.hosts import Site
from tests.drill.load import Load, Strangers
from tests.drill.needs import missing_tool, why_not_here
from tests.drill.scene import Figure, Scene
from tests.drill.waiting import WAITING
from tests.support.web.mixed_clients import NUM_KINDS

FIGURES = pytest.StashKey[list[Figure]]()
FIRST_NUMBER = 80_000  # of the clients, whose prompts follow from it


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in WAITING:
            item.add_marker(pytest.mark.skip(reason=f"waits for {WAITING[item.name]}"))


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    reason = why_not_here()
    if reason:
        pytest.skip(reason)
    missing = missing_tool()
    if missing:
        pytest.fail(missing, pytrace=False)
    site = Site((*ROUTERS, *NODES))
    yield site
    site.close()


@pytest.fixture(scope="session")
def cluster(
    site: Site, tmp_path_factory: pytest.TempPathFactory, numbers: itertools.count[int]
) -> Iterator[DrillCluster]:
    cluster = DrillCluster(site, tmp_path_factory.mktemp("drill"))
    warm_up(cluster, numbers)
    yield cluster
    cluster.close()


def warm_up(cluster: DrillCluster, numbers: itertools.count[int]) -> None:
    """Every kernel that clients need is compiled before anybody's pause is measured."""
    load = Load(cluster.site.hosts[ROUTERS[0]], URL, Strangers(numbers), num_slots=2 * NUM_KINDS)
    load.begin()
    load.meet_tokens()
    load.end()


@pytest.fixture(scope="session")
def numbers() -> itertools.count[int]:
    return itertools.count(FIRST_NUMBER)


@pytest.fixture
def scene(cluster: DrillCluster, request: pytest.FixtureRequest, numbers: itertools.count[int]) -> Iterator[Scene]:
    """Everyone is well before, and afterwards everything is back in its place."""
    cluster.heal()
    title = request.node.name.removeprefix("test_").replace("_", " ")
    yield Scene(cluster, title, request.config.stash[FIGURES], numbers)
    cluster.heal()
    cluster.check_whole()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash[FIGURES]
    if figures:
        terminalreporter.section("what streams saw", sep="-")
        terminalreporter.write_line(f"{'longest pause':>13}  streams  resumes  attempts  hits (one node)  scenario")
    for row in figures:
        hits = f"{row.hits.rate:.3f} ({row.hits.one_node:.3f})" if row.hits else "-"
        counts = f"{row.streams:7}  {row.resumes:7}  {row.attempts:8}"
        terminalreporter.write_line(f"{row.longest_pause_s:11.2f} s  {counts}  {hits:>15}  {row.scenario}")
    path = config.getoption("--drill-json")
    if path:
        Path(path).write_text(json.dumps([dataclasses.asdict(row) for row in figures], indent=1), encoding="utf-8")
