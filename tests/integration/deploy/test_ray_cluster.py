"""`baton ray` on real Ray clusters: three simulated machines of which one loses power, and a Ray of its own."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from shared.core import launcher
from tests.support.clusters.key_folders import make_keys
from tests.support.clusters.metrics_page import at_rest, nodes_of, pages_partition, read_metrics
from tests.support.clusters.ray_machines import (
    ROOT,
    BatonRay,
    Machines,
    Rows,
    all_run,
    environment,
    pids_of,
    ray_machines,
)
from tests.support.clusters.router_process import eventually
from tests.support.machine.listening import listening
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.machine.ports import free_port
from tests.support.web.mixed_clients import Client, make_client, stream_all

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.timeout(1800)

NODES = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
TOML = """
[ray]
address = "{address}"
prefill = 2
decode = 2
{more}
[model]
model = "hashlm"
[memory]
kv_bytes = "2MiB"
[node]
heartbeat_s = 0.1
silence_s = 4.0
[timeouts]
node_silence_s = 4.0
resume_wait_s = 300.0
[router]
port = {port}
node_endpoint = "tcp://127.0.0.1:{node_port}"
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with ray_machines(tmp_path_factory.mktemp("machines"), cpus=3) as machines:
        yield machines


MakeBaton = Callable[[str, str], tuple[BatonRay, str]]


@pytest.fixture
def make_baton(tmp_path: Path) -> Iterator[MakeBaton]:
    """Writes the file of one cluster: Ray's address ("" is a Ray of its own) and further lines in, the words for it
    and its router's address out. A cluster that the test leaves behind is taken down, or it would fail the next test.
    """
    made: list[BatonRay] = []

    def make(address: str, more: str) -> tuple[BatonRay, str]:
        port = free_port(4)  # two routers, each with a port for nodes
        toml = TOML.format(address=address, more=more, port=port, node_port=port + 2)
        made.append(BatonRay(tmp_path, toml))
        return made[-1], f"http://127.0.0.1:{port}"

    yield make
    if (tmp_path / ".baton" / "ray.json").exists():
        made[-1].run("down")


def machine_to_kill(rows: Rows) -> str:
    """With a node on it, and not the router, whose streams would end with it."""
    used = {row["ray_node"] for row in rows.values()}
    return min(used - {rows["router-0"]["ray_node"]})


def whole(url: str, nodes: set[str]) -> bool:
    """A router that has just begun does not answer yet."""
    try:
        metrics = read_metrics(url)
    except httpx.TransportError:
        return False
    return nodes_of(metrics) == nodes and at_rest(metrics) and pages_partition(metrics)


def changed(before: Rows, after: Rows) -> set[str]:
    """Those whose daemon is another process."""
    pids = pids_of(before)
    return {name for name, pid in pids_of(after).items() if pids[name] != pid}


def stream_while(url: str, clients: list[Client], happens: Callable[[], None]) -> None:
    """`happens` once every client has tokens; every stream is equal to that of a run that nothing happened to."""

    async def meanwhile() -> None:
        while not all(client.num_tokens for client in clients):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(happens)

    asyncio.run(stream_all(url, clients, meanwhile))
    for client in clients:
        client.check()


def long_clients(first: int) -> list[Client]:
    return [make_client(first + kind, 1500) for kind in range(8)]


def ends(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=HANG_GUARD_S)[1]


@pytest.mark.long
def test_a_machine_loses_power_under_streams(tmp_path: Path, machines: Machines, make_baton: MakeBaton) -> None:
    """Ray starts its nodes elsewhere, every stream is whole, pools are whole, `down` leaves nobody. With keys."""
    more = f'[security]\nkeys = "{make_keys(tmp_path / "keys", sorted(NODES), ["router-0"])}"'
    baton, url = make_baton(machines.address, more)
    baton.up()
    again = baton.run("up", str(baton.file))
    assert again.returncode == 2 and "runs already" in again.stderr
    assert baton.run("status").returncode == 0, "and the last cluster that was started is still known"
    before = baton.rows()
    assert set(before) == NODES | {"router-0"} and all_run(before)
    assert {row["machine"] for row in before.values()} == {"127.0.0.2", "127.0.0.3", "127.0.0.4"}, "spread over all"
    lost = machine_to_kill(before)
    hit = {name for name, row in before.items() if row["ray_node"] == lost}

    stream_while(url, long_clients(0), lambda: machines.kill(lost))
    after = baton.until(lambda rows: all_run(rows) and changed(before, rows) >= hit, "they are back")
    assert changed(before, after) == hit, "the others never noticed"
    assert lost not in {row["ray_node"] for row in after.values()}
    eventually(lambda: whole(url, NODES))

    actor_and_daemon_die_together(baton, after)
    eventually(lambda: whole(url, NODES))
    the_router_moves(baton, machines)
    an_actor_that_ray_gives_up_is_made_again(baton, machines.address)
    eventually(lambda: whole(url, NODES))
    family = baton.family()
    assert baton.run("down", str(baton.file)).returncode == 0
    assert ends(family)
    assert baton.run("status", str(baton.file)).returncode == 2, "there is no such cluster any more"


def actor_and_daemon_die_together(baton: BatonRay, rows: Rows) -> None:
    """Whichever is killed, Ray starts both again; a router where nodes look for it."""
    daemons = [psutil.Process(rows[name]["pid"]) for name in ("router-0", "decode-0", "decode-1")]
    actors = [psutil.Process(daemon.ppid()) for daemon in daemons]
    for process in (daemons[0], daemons[1], actors[2]):
        process.kill()
    assert ends(daemons + actors)
    hit = {"router-0", "decode-0", "decode-1"}
    baton.until(lambda now: all_run(now) and changed(rows, now) == hit, "all run again, and the others still")


def the_router_moves(baton: BatonRay, machines: Machines) -> None:
    """Its machine goes; it comes back at another address, and nodes are started anew with that."""
    rows = baton.rows()
    machines.add()
    machines.kill(rows["router-0"]["ray_node"])
    baton.until(lambda now: all_run(now) and changed(rows, now) == set(rows), "all run, and dial the new address")
    assert baton.rows()["router-0"]["machine"] != rows["router-0"]["machine"]


def test_without_keys_several_machines_are_refused(machines: Machines, make_baton: MakeBaton) -> None:
    baton, _ = make_baton(machines.address, "")
    done = baton.run("up", str(baton.file))
    assert done.returncode == 2 and "baton keys create DIR --router router-0" in done.stderr, done.stderr


GIVE_UP = """
import ray, sys
ray.init(sys.argv[1], namespace="baton-baton", log_to_driver=False)
ray.kill(ray.get_actor(sys.argv[2]), no_restart=True)
"""


def an_actor_that_ray_gives_up_is_made_again(baton: BatonRay, address: str) -> None:
    before = baton.until(all_run, "everyone runs")
    command = [sys.executable, "-c", GIVE_UP, address, "decode-1"]
    subprocess.run(command, env=environment(baton.home), check=True, timeout=HANG_GUARD_S)
    baton.until(lambda now: all_run(now) and changed(before, now) == {"decode-1"}, "it is back")


# ---- a Ray of its own


@pytest.mark.long
def test_a_ray_of_its_own_beside_another_project(make_baton: MakeBaton) -> None:
    """Ray would have its workers import from where `baton ray up` was typed, and from PYTHONPATH."""
    baton, _ = make_baton("", "")
    baton.up()
    family = everyone(baton)
    daemons = [psutil.Process(row["pid"]).cmdline() for row in baton.rows().values()]
    assert len(daemons) > len(NODES) and all(launcher.__file__ in command for command in daemons)
    assert baton.run("down").returncode == 0
    assert ends(family)


# ---- the checkout shipped to it, roles that grow and shrink

SHIPPED = f"""
working_dir = "{ROOT}"
routers = 2
[scaling]
max_decode = 3
busy_rows = 0.05
busy_waiting = 0.1
up_after_s = 0.0
down_after_s = 1.0
settle_s = 0.0
"""


@pytest.mark.long
def test_a_ray_of_its_own_that_scales(make_baton: MakeBaton) -> None:
    """The shipped checkout is what runs, two routers share the nodes, nothing listens beyond loopback, decode nodes
    come under load and go without it, drained."""
    baton, url = make_baton("", SHIPPED)
    host, _, port = url.rpartition(":")
    both = (url, f"{host}:{int(port) + 1}")
    baton.up()
    rows = baton.rows()
    assert set(rows) == NODES | {"router-0", "router-1"}
    family = everyone(baton)
    for row in rows.values():
        daemon = psutil.Process(row["pid"])
        assert "working_dir_files" in daemon.environ()["PYTHONPATH"]
        assert any(part.startswith("--threads=1") for part in daemon.cmdline()), "the core plan is said, not inherited"
    sockets = listening([process.pid for process in family])
    assert len(sockets) > len(NODES) and [s for s in sockets if not on_loopback(s[0])] == []

    async def until_it_has_grown() -> None:
        while "decode-2" not in nodes_of(await asyncio.to_thread(read_metrics, url)):
            clients.extend(more := long_clients(8 * len(clients)))
            await asyncio.gather(*(stream_all(target, more[i::2]) for i, target in enumerate(both)))

    clients: list[Client] = []
    asyncio.run(until_it_has_grown())
    for client in clients:
        client.check()
    baton.until(lambda rows: "decode-2" not in rows and all_run(rows), "it has shrunk")
    for target in both:
        eventually(lambda target=target: whole(target, NODES))
    family += everyone(baton)
    assert baton.run("down").returncode == 0
    assert ends(family)


def everyone(baton: BatonRay) -> list[psutil.Process]:
    """Ray's own processes and all that they started."""
    ray = psutil.Process(json.loads((baton.home / ".baton" / "ray.json").read_text())["head_pid"])
    return [ray, *ray.children(recursive=True)]


def on_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def test_another_package_named_shared_is_refused(tmp_path: Path, machines: Machines, make_baton: MakeBaton) -> None:
    checkout = tmp_path / "checkout"
    for package in ("deploy", "deploy/ray", "shared"):
        (checkout / package).mkdir(parents=True)
        (checkout / package / "__init__.py").write_text('"""Something else."""\n')
    keys = make_keys(tmp_path / "keys", sorted(NODES), ["router-0"])
    baton, _ = make_baton(machines.address, f'working_dir = "{checkout}"\n[security]\nkeys = "{keys}"')
    done = baton.run("up", str(baton.file))
    assert done.returncode == 2 and "its `shared` is another package" in done.stderr, done.stdout + done.stderr
    assert baton.run("status", str(baton.file)).returncode == 2, "nothing was started"
