"""The areas from which mutants are drawn: files where nothing may break silently."""

from __future__ import annotations

from dataclasses import dataclass

from catalogue import ROOT, find_scope


@dataclass(frozen=True)
class Area:
    """Some files, and how many mutants are drawn from them."""

    wanted: int
    files: tuple[str, ...]


def _files(room: str, *names: str) -> tuple[str, ...]:
    """Return the files of some modules of a room, from the root."""
    paths = (find_scope(f"{room}.{name}", ROOT).path for name in names)
    return tuple(path.relative_to(ROOT).as_posix() for path in paths)


AREAS = {
    "relay": Area(20, _files("shared.engine", "future_map", "worker", "forward_batch", "lease", "engine")),
    "pools": Area(20, _files("shared.kv", "pages", "rows", "manager", "pool")),
    "prefix cache": Area(15, _files("shared.kv", "prefix_cache")),
    "admission": Area(
        25,
        (
            *_files("shared.sched.planning", "planner", "grants", "capacity"),
            *_files("shared.sched.requests", "intake", "queues", "results", "output", "suspects"),
            *_files("shared.sched.memory", "ungranted", "page_budget"),
            *_files("shared.sched.steps", "chunking", "lengths", "batch", "freeze", "prebuilt"),
        ),
    ),
    "hand-off": Area(
        25,
        (
            *_files(
                "shared.node",
                "loop.node",
                "records.convert",
                "routers.lives",
                "records.tombstones",
                "records.page_ranges",
            ),
            *_files("shared.engine", "transfer_jobs"),
            *_files("prefill_node", "bootstrap", "inflight", "reach", "side"),
            *_files("decode_node", "prealloc", "transfer", "prebuilt", "side"),
            *_files("shared.transfer", "interface", "frames", "shm"),
        ),
    ),
    "routing": Area(
        25,
        (
            *_files("router.dispatch", "dispatcher", "attempts", "progress", "moves"),
            *_files("router.requests", "journal", "attempt", "pairs", "suspects", "abort_log"),
            *_files("router.fleet", "registry", "leaving", "kinds", "breaker"),
            *_files("router.policy", "placement"),
        ),
    ),
    "wire": Area(
        20,
        (
            *_files("shared.wire", "codec", "messages", "errors", "fitting", "peers", "wakeup"),
            *_files("shared.wire.zeromq", "peer_gate", "connections", "dialling", "link", "link_options", "sockets"),
        ),
    ),
}


def _folders(*folders: str) -> tuple[str, ...]:
    """Return all files of some folders, from the root."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return tuple(path.relative_to(ROOT).as_posix() for path in paths)


ARGUMENT_AREAS = {
    "dispatch": Area(60, _folders("router/dispatch", "router/requests")),
    "fleet": Area(45, _folders("router/fleet")),
    "queue": Area(30, _folders("router/queue")),
    "sides": Area(60, _folders("prefill_node", "decode_node")),
    "transfer": Area(30, _folders("shared/transfer")),
    "wire": Area(30, _folders("shared/wire")),
    "sched": Area(45, _folders("shared/sched")),
}
