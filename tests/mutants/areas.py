"""The areas from which mutants are drawn, and who is asked about them: files where nothing may break silently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from catalogue import ROOT, find_scope
from trial import Net

NUM_CLUSTER_SEEDS = 20
SIMULATIONS = (
    *("scripts_rows", "scripts_inputs", "scripts_lengths", "scripts_handoff", "scripts_liveness"),
    *("nodes_random", "equivalence", "explorer", "cluster_seeds"),
)
WHOLE_CLUSTER = ("cluster_seeds", "cluster_deaths")


@dataclass(frozen=True)
class Area:
    """Some files, and who knows them: unit tests of a few seconds, slower ones, and simulations."""

    wanted: int
    files: tuple[str, ...]
    quick: tuple[str, ...]
    slow: tuple[str, ...]
    simulations: tuple[str, ...] = SIMULATIONS

    def quick_net(self, file: str) -> Net:
        """Tests that are named like the file go first."""
        return Net(tuple(sorted(tests_of(self.quick), key=lambda path: Path(file).stem not in path)))

    def rest_net(self) -> Net:
        return Net((*tests_of(self.slow), *tests_of(self.simulations, "simulation")), NUM_CLUSTER_SEEDS)


def tests_of(names: tuple[str, ...], tier: str = "unit") -> tuple[str, ...]:
    return tuple(f"tests/{tier}/test_{name}.py" for name in names)


def _files(room: str, *names: str) -> tuple[str, ...]:
    """Return the files of some modules of a room, from the root."""
    paths = (find_scope(f"{room}.{name}", ROOT).path for name in names)
    return tuple(path.relative_to(ROOT).as_posix() for path in paths)


AREAS = {
    "relay": Area(
        wanted=20,
        files=_files("shared.engine", "future_map", "worker", "forward_batch", "lease", "engine"),
        quick=(
            *("engine_plan", "engine_future_map", "engine_armed", "engine_leaks", "engine_recover", "engine_times"),
            *("engine_masks", "sched_prebuilt"),
        ),
        slow=("hashlm_draft", "hazards", "spec_metrics", "sample_stream"),
    ),
    "pools": Area(
        wanted=20,
        files=_files("shared.kv", "pages", "rows", "manager", "pool"),
        quick=("kv_pages", "kv_rows", "kv_manager", "kv_pool"),
        slow=("kv_stateful", "transfer_conformance"),
    ),
    "prefix cache": Area(
        wanted=15,
        files=_files("shared.kv", "prefix_cache"),
        quick=("kv_prefix_cache", "kv_manager"),
        slow=("kv_stateful", "sched_prebuilt"),
    ),
    "admission": Area(
        wanted=25,
        files=_files(
            "shared.sched",
            *("planner", "intake", "grants", "queues", "capacity", "results", "ungranted", "page_budget", "chunking"),
            *("lengths", "batch", "freeze", "output", "prebuilt", "suspects"),
        ),
        quick=(
            "sched_scheduler",
            "sched_chunking",
            "sched_batch",
            "sched_prebuilt",
            "sched_failed_step",
            "sched_history",
            "sched_books",
            "sched_suspects",
            "sched_long_queue",
            "sched_page_budget",
            "sched_scores",
            "node_times",
            "engine_masks",
        ),
        slow=("engine_recover", "sched_stateful"),
    ),
    "hand-off": Area(
        wanted=25,
        files=(
            *_files("shared.node", "node", "convert", "routers.lives", "tombstones"),
            *_files("shared.engine", "transfer_jobs"),
            *_files("prefill_node", "bootstrap", "inflight", "reach", "side"),
            *_files("decode_node", "prealloc", "transfer", "prebuilt", "page_ranges", "side"),
            *_files("shared.transfer", "interface", "frames", "shm"),
        ),
        quick=(
            *("node_books", "node_queues", "node_returns", "node_faults", "node_deaths", "node_transfer_order"),
            *(
                "node_times",
                "node_drain",
                "node_waits",
                "node_reach",
                "node_siblings",
                "node_unpinned",
                "node_begun",
                "node_rounds",
                "node_strangers",
                "node_layers",
            ),
            "transfer_conformance",
        ),
        slow=("node_pair",),
    ),
    "routing": Area(
        wanted=25,
        files=(
            *_files("router.dispatch", "dispatcher", "attempts", "progress", "moves"),
            *_files("router.requests", "journal", "attempt", "pairs", "suspects", "abort_log"),
            *_files("router.fleet", "registry", "leaving", "kinds", "breaker"),
            *_files("router.policy", "placement"),
        ),
        quick=(
            *("router_dispatch", "router_resume", "router_registry", "router_journal", "router_pairs", "router_moves"),
            *("router_suspects", "router_kinds", "router_absence", "router_scores", "two_routers"),
        ),
        slow=(),
        simulations=WHOLE_CLUSTER,
    ),
    "wire": Area(
        wanted=20,
        files=(
            *_files("shared.wire", "codec", "messages", "errors", "fitting", "peers", "wakeup"),
            *_files("shared.wire.zeromq", "peer_gate", "connections", "dialling", "link", "link_options", "sockets"),
        ),
        quick=(
            "wire_codec",
            "wire_connections",
            "wire_dialling",
            "wire_errors",
            "wire_fitting",
            "wire_gate",
            "wire_limits",
            "wire_link_ends",
            "wire_link",
            "wire_messages",
            "wire_silence",
            "wire_sockets",
        ),
        slow=("wire_keys",),
        simulations=WHOLE_CLUSTER,
    ),
}


def area_of_folders(wanted: int, folders: tuple[str, ...], *tests: str) -> Area:
    """All files of some folders, and the unit tests whose names begin so."""
    files = (path.relative_to(ROOT).as_posix() for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    stems = sorted(path.stem.removeprefix("test_") for path in (ROOT / "tests/unit").glob("test_*.py"))
    quick = tuple(stem for stem in stems if stem.startswith(tests))
    return Area(wanted, tuple(files), quick, (), WHOLE_CLUSTER)


ROUTER_TESTS = ("router_", "two_routers", "spending", "tenants", "prefix_", "fair_", "rate_", "placement", "tickets")
ARGUMENT_AREAS = {
    "dispatch": area_of_folders(60, ("router/dispatch", "router/requests"), *ROUTER_TESTS),
    "fleet": area_of_folders(45, ("router/fleet",), *ROUTER_TESTS),
    "queue": area_of_folders(30, ("router/queue",), *ROUTER_TESTS),
    "sides": area_of_folders(60, ("prefill_node", "decode_node"), "node_", "prefix_"),
    "transfer": area_of_folders(30, ("shared/transfer",), "transfer_", "node_"),
    "wire": area_of_folders(30, ("shared/wire",), "wire_"),
    "sched": area_of_folders(45, ("shared/sched",), "sched_", "engine_", "prefix_", "node_"),
}


def all_tests(areas: Mapping[str, Area]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(quick, the rest)"""
    quick = {test for area in areas.values() for test in tests_of(area.quick)}
    slow = {test for area in areas.values() for test in tests_of(area.slow)} - quick
    simulations = {test for area in areas.values() for test in tests_of(area.simulations, "simulation")}
    return tuple(sorted(quick)), (*sorted(slow), *sorted(simulations))
