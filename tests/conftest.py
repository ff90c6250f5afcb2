"""For all tests: thread settings before torch loads, which part of them runs, GPU tests only where there is a GPU."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from shared.config import core_plan
from shared.config.core_plan import CorePlan
from tests.tiers import TURNS, share_of

if TYPE_CHECKING:
    from tests.support.hazards.attach import Hazards

LISTS = {
    part: Path(__file__).with_name(f"{part}.txt") for part in ("deep", "long")
}  # tests/mutants/choose.py wrote them
FIGURES = "figures"  # the property of a test's report that holds its lines
running: list[str] = []  # tests that were begun and have not ended, in whichever process
GPU_TESTS = Path(__file__).parent / "gpu"
core_plan.apply(CorePlan(threads=1))
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and tests of Ctrl-C would wait in vain."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", choices=("first", *LISTS), help="first: what no list names; else what tests/PART.txt names"
    )
    parser.addoption("--turn", type=int, help=f"0 to {TURNS - 1}: with --part long, only this share of it")
    parser.addoption("--seeds", type=int, default=120, help="seeds of the equivalence matrix (600: the long run)")
    parser.addoption("--transport", default="", help="chaos: what carries all pages; else shared memory and messages")
    parser.addoption("--drill-json", default="", help="drill: a file that gets the figures of its scenarios")
    parser.addoption("--long", action="store_true", help="tests marked long, too, which take minutes each")
    parser.addoption("--all-ranks", action="store_true", help="every transport with every two numbers of ranks")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which no test runs."""
    part = config.getoption("--part")
    if part is None or collection_path.suffix != ".py":
        return None
    file = collection_path.relative_to(config.rootpath).as_posix()
    lists = lists_of(config.getoption("--turn"))
    if part in LISTS:
        return None if file in files_of(lists[part]) else True
    return True if any(file in listed for listed in lists.values()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, lists = config.getoption("--part"), lists_of(config.getoption("--turn"))
    left_out = {
        item
        for item in items
        if (item.get_closest_marker("long") and not config.getoption("--long"))
        or (part is not None and part != part_of(item.nodeid, lists))
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker("gpu")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def entries(part: str) -> list[str]:
    return LISTS[part].read_text(encoding="utf-8").splitlines()


@functools.cache
def lists_of(turn: int | None) -> dict[str, frozenset[str]]:
    """`turn`: take only this share of tests/long.txt."""
    long = entries("long") if turn is None else share_of(turn)
    return {"deep": frozenset(entries("deep")), "long": frozenset(long)}


@functools.cache
def files_of(listed: frozenset[str]) -> set[str]:
    return {entry.partition("::")[0] for entry in listed}


def part_of(nodeid: str, lists: Mapping[str, Collection[str]]) -> str:
    """The part whose list has the case; else its test; else its whole file."""
    file, _, rest = nodeid.partition("::")
    names = (nodeid, f"{file}::{rest.partition('[')[0]}", file)
    return next((part for name in names for part, listed in lists.items() if name in listed), "first")


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nodes of tests pack weights into a folder that goes with the run, not into the user's."""
    folder = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield
    shutil.rmtree(folder)


def pytest_runtest_logstart(nodeid: str) -> None:
    running.append(nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    running.remove(nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode) -> None:
    """Print the figures of tests; and, after the Ctrl-C that tests/tiers.py sends to a tier that hangs, say where."""
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        for name, text in report.user_properties if report.when == "call" else ():
            if name == FIGURES:
                terminalreporter.write_line(text)
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        terminalreporter.write_line(f"ended in {', '.join(running) or 'no test'}")


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Keep a line for the summary of the run. A print would be lost where tests run in processes of their own."""
    return lambda text: record_property(FIGURES, text)


def has_gpu() -> bool:
    """Loads torch, so it is asked only when a GPU test was collected."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def hazards() -> Iterator[Hazards]:
    """Watch any core: `core = hazards.watch(make_core(...))`. Unordered or foreign accesses fail the test."""
    from tests.support.hazards.attach import watching

    with watching() as watched:
        yield watched
