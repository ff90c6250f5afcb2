"""Run `baton ray up`, `status` and `down`, as a client of Ray."""

from __future__ import annotations

import contextlib
import json
import logging
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.cluster.ready import count_ready, url, write_line
from deploy.columns import aligned
from deploy.hub.local_model import with_local_model, with_pinned_model
from deploy.ray import launch_plan as plan
from deploy.ray import own_ray as head
from deploy.ray.actors import BASE_GROUP, find_actor, find_group, names_here
from deploy.ray.manager import MANAGER, answers, find_manager, make_manager, remove
from deploy.ray.own_ray import RayRecord
from deploy.ray.report import FAILED, IDLE, ROLES, ROUTER, RUNNING, ActorReport, StatusRow, StopOrder, role_of
from shared.config.models.model_path import resolve_model
from shared.config.processes import RayClusterConfig
from shared.core import launcher
from shared.core.errors import ConfigError
from shared.core.extras import OURS

POLL_S = 0.5
CALL_TIMEOUT_S = 30.0
CHECK_TIMEOUT_S = 120.0
# If this file has the same bytes on a machine, the package `shared` there is ours.
MARKER = "shared", "__init__.py"


def say(text: str) -> None:
    write_line(f"baton ray: {text}")


@contextlib.contextmanager
def connected(address: str, cluster: str, working_dir: str = "") -> Iterator[None]:
    """Connect this process to Ray as a client.

    Ray's threads in this process print messages, e.g. that a machine died. Until the last of these threads ends, stdout
    goes to stderr. Print results afterwards.
    """
    which_code = shipped(Path(working_dir).absolute()) if working_dir else {"worker_process_setup_hook": code_finder()}
    with contextlib.redirect_stdout(sys.stderr):
        try:
            with contextlib.chdir(launcher.CODE):  # Ray puts this folder first on workers' path
                ray.init(
                    address=address,
                    namespace=f"baton-{cluster}",
                    runtime_env=which_code,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"no Ray cluster at {address}: {error}") from None
        try:
            yield
        finally:
            ray.shutdown()


def code_finder() -> Callable[[], None]:
    """Return a function that lets a worker import its machine's Baton.

    Ray sends an inner function as code, and an outer one by name, which the worker can't import yet.
    """

    def find_code() -> None:
        with contextlib.suppress(ImportError):  # told by check_installations
            import baton_serve

            baton_serve.put_code_first()

    return find_code


def shipped(checkout: Path) -> dict[str, Any]:
    """Let Ray ship only our packages from a checkout. Raise ConfigError for another folder."""
    if not (checkout / "deploy" / "ray").is_dir():
        raise ConfigError(f"[ray] working_dir is {str(checkout)!r}: that is not a checkout of Baton")
    left_out = [f"/{entry.name}" for entry in sorted(checkout.iterdir()) if entry.name not in OURS]
    return {"working_dir": str(checkout), "excludes": [*left_out, "__pycache__"]}


# ---- up


def up(config: RayClusterConfig) -> int:
    plan.check_config(config)
    head.own_folder()
    fetched = with_pinned_model if config.ray.address else with_local_model
    config = replace(config, nodes=fetched(config.nodes))
    record = reach(config)
    try:
        with connected(record.address, record.cluster, config.ray.working_dir):
            rows = launch(config, record)
    except BaseException:
        if record.head is not None:
            forget_cluster(record)
        raise
    write_line(announcement(config, rows), sys.stdout)
    return 0


def reach(config: RayClusterConfig) -> RayRecord:
    if config.ray.address:
        return RayRecord(config.ray.address, config.ray.cluster)
    resolve_model(config.nodes.model.model)
    before = head.read_record()
    if before is not None and before.head is not None:
        raise ConfigError(f"cluster {before.cluster!r} runs on this machine already; `baton ray down` ends it")
    say("starting Ray on this machine")
    return head.start(config.ray.cluster, plan.most_cpus(config))


def launch(config: RayClusterConfig, record: RayRecord) -> list[StatusRow]:
    """After a failure, take everything down."""
    runs_already = ConfigError(f"cluster {record.cluster!r} runs already; `baton ray down` ends it")
    if find_manager() is not None:
        raise runs_already
    machines = alive_machines()
    plan.check_machines(config, [node["NodeManagerAddress"] for node in machines])
    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]  # half of ray has no types
    config = plan.with_gpus(config, there.get("GPU", 0.0))
    plan.check_resources(config, there)
    plan.check_bundles(config, [node["Resources"] for node in machines])
    check_installations(machines)
    config = plan.with_memory_share(config, len(machines))
    try:
        make_manager(config)
        wait_ready(config, time.monotonic() + config.ray.start_timeout_s)
    except ActorAlreadyExistsError:  # another `baton ray up` was faster
        raise runs_already from None
    except BaseException:
        say("taking down what was started")
        take_down()
        raise
    head.write_record(record)
    return rows_of_manager()


def alive_machines() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # half of ray has no types
    return [node for node in nodes if node["Alive"]]


def check_installations(machines: Sequence[dict[str, Any]]) -> None:
    """Raise ConfigError if a machine lacks Baton, or has another package named `shared`. On the machine, the check
    calls only the standard library."""
    ours = pkgutil.get_data(*MARKER)
    for machine in machines:
        where = NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False)
        answer = ray.remote(pkgutil.get_data).options(num_cpus=0, scheduling_strategy=where).remote(*MARKER)
        found, why = fetched(answer)
        if found != ours:
            raise ConfigError(
                f"machine {machine['NodeManagerAddress']} has no Baton ({why or 'its `shared` is another package'}): "
                "install the wheel there, in the Python that Ray runs, or ship a checkout with [ray] working_dir"
            )


def fetched(answer: Any) -> tuple[bytes | None, str]:
    try:
        return ray.get(answer, timeout=CHECK_TIMEOUT_S), ""
    except (RayError, ImportError, OSError) as error:
        return None, str(error).strip().splitlines()[-1][:200]


def wait_ready(config: RayClusterConfig, deadline: float) -> None:
    """Wait until every router has every node, and print changes. Raise ConfigError on failure or at the deadline."""
    said: dict[str, str] = {}
    while True:
        rows = rows_of_manager()
        for row in rows:
            if said.get(row.name) != row.state:
                said[row.name] = row.state
                say(f"{row.name}: {row.state}" + (f" on {row.machine}" if row.machine else ""))
            if row.state == FAILED or (row.words and row.state == IDLE):
                raise ConfigError(f"{row.name} {row.state}: {row.words}")
        if rows and all(row.state == RUNNING for row in rows) and routers_ready(config):
            return
        if time.monotonic() > deadline:
            waiting = ", ".join(f"{row.name} ({row.words or row.state})" for row in rows)
            raise ConfigError(f"not ready after {config.ray.start_timeout_s:g} s: {waiting or 'no manager'}")
        time.sleep(POLL_S)


def rows_of_manager() -> list[StatusRow]:
    """Return no rows while Ray is placing the manager."""
    manager = find_manager()
    found: list[StatusRow] = (
        answers(lambda name: manager.status.remote(), [MANAGER]).get(MANAGER, []) if manager else []
    )
    return found


def routers_ready(config: RayClusterConfig) -> bool:
    wanted = config.ray.prefill + config.ray.decode
    routers = [name for name in plan.names_at_start(config) if role_of(name) == ROUTER]
    handles: dict[str, Any] = {name: find_actor(name) for name in routers}
    pages = answers(lambda name: handles[name].page.remote("/ready"), [name for name in routers if handles[name]])
    return len(pages) == len(routers) and all(count_ready(page.encode()) >= wanted for page in pages.values())


def announcement(config: RayClusterConfig, rows: Sequence[StatusRow]) -> str:
    """The printed addresses are valid only on the routers' machines."""
    routers = [row for row in rows if role_of(row.name) == ROUTER]
    urls = {row.name: url(*plan.http_address(config, row.name), config.http.scheme) for row in routers}
    lines = [f"  {row.name:<12} {urls[row.name]}  on {row.machine}" for row in routers]
    return "\n".join(
        ["\nBaton is ready:", *lines, "  status       baton ray status", "  stop         baton ray down\n"]
    )


# ---- status and down


def chosen(address: str, cluster: str) -> RayRecord:
    """Return the cluster at `address`, or else the cluster that was last started here."""
    record = head.read_record()
    if address:
        return RayRecord(address, cluster)
    if record is None or (cluster and record.cluster != cluster):
        raise ConfigError("no cluster was started from here; name the cluster's file, which has its address")
    return record


def status(record: RayRecord, as_json: bool) -> int:
    """Return 0 if all daemons run, else 1."""
    with connected(record.address, record.cluster):
        rows = rows_of_manager()
        missing = find_manager() is None
    if missing:
        raise ConfigError(f"no cluster {record.cluster!r} at {record.address}")
    if as_json:
        write_line(json.dumps([asdict(row) for row in rows]), sys.stdout)
    else:
        write_line(table(rows), sys.stdout)
    return 0 if rows and all(row.state == RUNNING for row in rows) else 1


def table(rows: Sequence[StatusRow]) -> str:
    cells = [("name", "state", "machine", "pid", "cores", "restarts")]
    cells += [
        (row.name, row.state, row.machine, str(row.pid or ""), ",".join(map(str, row.cores)), str(row.restarts))
        for row in rows
    ]
    return "\n".join([aligned(cells), *(f"\n{row.name}: {row.words}" for row in rows if row.words)])


def down(record: RayRecord) -> int:
    if record.head_pid and record.head is None:
        head.forget_record()
        raise ConfigError("the Ray that was started here is gone, and so are its nodes")
    try:
        with connected(record.address, record.cluster):
            if not names_here() and record.head is None:
                raise ConfigError(f"no cluster {record.cluster!r} at {record.address}")
            take_down()
    except ConfigError as error:  # Ray may not answer if its start was killed
        if record.head is None:
            raise
        say(error.message)
    forget_cluster(record)
    say("down")
    return 0


def forget_cluster(record: RayRecord) -> None:
    if record.head is not None:
        say("stopping Ray")
        head.stop(record)
    if head.read_record() == record:
        head.forget_record()


def take_down() -> None:
    """Stop all actors, found by name, even without a manager.

    Routers stop first: they finish open requests while nodes still serve.
    """
    manager = find_manager()
    if manager is not None:
        with contextlib.suppress(RayError):
            ray.get(manager.rest.remote(), timeout=CALL_TIMEOUT_S)
        ray.kill(manager, no_restart=True)
    names = [name for name in names_here() if role_of(name) in ROLES]
    stop_all([name for name in names if role_of(name) == ROUTER])
    stop_all([name for name in names if role_of(name) != ROUTER])
    group = find_group(BASE_GROUP)
    if group is not None:
        ray.util.remove_placement_group(group)


def stop_all(names: Sequence[str]) -> None:
    """Stop actors and their daemons. Actors kill late daemons. Unresponsive actors are killed, with their daemons."""
    handles = {name: handle for name in names if (handle := find_actor(name)) is not None}
    heard = dict.fromkeys(handles, time.monotonic())
    while heard:
        reports: dict[str, ActorReport] = answers(lambda name: handles[name].tend.remote(StopOrder()), heard)
        now = time.monotonic()
        running = {name for name in heard if name in reports and reports[name].state == RUNNING}
        late = {name for name in heard if name not in reports and now - heard[name] < CALL_TIMEOUT_S}
        heard = {name: now if name in running else heard[name] for name in running | late}
        time.sleep(POLL_S if heard else 0.0)
    for name, handle in handles.items():
        remove(name, handle)
        say(f"{name}: stopped")
