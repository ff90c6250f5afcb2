"""Process groups over real gloo: entries travel by hand, bytes through sockets. What blocks, and what ends it."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from shared.core.errors import ConfigError, HandoffFailed
from shared.transfer.group_thread import GroupThread
from shared.transfer.link_store import MAX_ENTRIES, LinkStore
from shared.transfer.torch_groups import RECEIVER, SENDER, Transfer, listeners, make_torch_group
from shared.transfer.transports import open_group
from tests.support.cores.core_rig import CoreKnobs, Job, draw_jobs
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.node_pair import Net, expected, make_node

CPU = torch.device("cpu")
HOST = "127.0.0.1"
Groups = Callable[[int], GroupThread]


@pytest.fixture
def groups() -> Iterator[Groups]:
    made: list[GroupThread] = []

    def make(rank: int) -> GroupThread:
        made.append(open_group("gloo", rank, HOST, CPU, lambda: None))
        return made[-1]

    yield make
    for group in made:
        group.abort(HandoffFailed("the end"))
    assert all(group.join(HANG_GUARD_S) for group in made), "a thread is left behind"


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + HANG_GUARD_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def connect(receiver: GroupThread, sender: GroupThread) -> None:
    told = 0

    def tell() -> bool:
        nonlocal told
        for group, other in ((receiver, sender), (sender, receiver)):
            for entry in group.take_entries():
                other.deliver(*entry)
                told += 1
        return told == 4

    until(tell)


def data(value: int, size: int = 1000) -> torch.Tensor:
    """A transfer of one row."""
    return torch.full((1, size), value, dtype=torch.uint8)


def taken(group: GroupThread, count: int) -> list[Transfer]:
    found: list[Transfer] = []
    until(lambda: found.extend(group.take_finished()) or len(found) == count)
    return found


def test_transfers_come_in_the_order_in_which_they_were_posted(groups: Groups) -> None:
    receiver, sender = groups(RECEIVER), groups(SENDER)
    sizes = [1, 1000, 3_000_000, 8, 70_000]
    for size in sizes[:2]:  # before anything is connected
        receiver.post(data(0, size))
    connect(receiver, sender)
    for value, size in enumerate(sizes, 1):
        sender.post(data(value, size))
    for size in sizes[2:]:
        receiver.post(data(0, size))
    came = taken(receiver, len(sizes))
    rows = [row for transfer in came for row in transfer]
    assert [(len(row), int(row[0]), int(row[-1])) for row in rows] == [
        (size, value, value) for value, size in enumerate(sizes, 1)
    ]
    assert len(taken(sender, len(sizes))) == len(sizes)


def test_rows_of_a_transfer_come_into_their_places(groups: Groups) -> None:
    receiver, sender = groups(RECEIVER), groups(SENDER)
    connect(receiver, sender)
    target, scattered = torch.zeros(3, 500, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8).repeat(500, 1).T
    receiver.post(target)
    sender.post([scattered[row].contiguous() for row in (4, 1, 8)])
    assert taken(receiver, 1)[0] is target
    assert [int(row.min()) for row in target] == [int(row.max()) for row in target] == [4, 1, 8]


def test_a_slow_sender_is_waited_for(groups: Groups) -> None:
    receiver, sender = groups(RECEIVER), groups(SENDER)
    connect(receiver, sender)
    receiver.post(data(0))
    time.sleep(0.05)
    assert not receiver.take_finished() and not receiver.error
    sender.post(data(5))
    assert int(taken(receiver, 1)[0][0][0]) == 5


@pytest.mark.parametrize("phase", ["before anything", "connecting", "receiving"])
def test_an_abort_ends_whoever_blocks(groups: Groups, phase: str) -> None:
    """gloo itself would wait for a silent peer for ever."""
    receiver, sender = groups(RECEIVER), groups(SENDER)
    if phase == "connecting":
        until(lambda: bool(receiver.take_entries()))
    elif phase == "receiving":
        connect(receiver, sender)
        receiver.post(data(0))
        time.sleep(0.05)
    reason = HandoffFailed("the peer is proven dead")
    receiver.abort(reason)
    assert receiver.join(HANG_GUARD_S)
    assert receiver.error is reason and not receiver.take_finished()
    if phase == "receiving":  # the other end notices with what it does next
        sender.post(data(1))
        until(lambda: sender.error)
        assert "RuntimeError" in str(sender.error) and not sender.take_finished()


PEER = """
import sys, torch
from shared.transfer.transports import open_group
from shared.transfer.torch_groups import SENDER
group = open_group("gloo", SENDER, "127.0.0.1", torch.device("cpu"), lambda: None)
told = 0
while told < 2:
    for name, value in group.take_entries():
        print(name, value.hex(), flush=True)
        told += 1
        name, value = sys.stdin.readline().split()
        group.deliver(name, bytes.fromhex(value))
sys.stdin.read()
"""


def test_a_sender_that_is_killed_breaks_its_group(groups: Groups) -> None:
    receiver = groups(RECEIVER)
    process = subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stdin is not None
        for _ in range(2):
            name, value = process.stdout.readline().split()
            entries: list[tuple[str, bytes]] = []
            until(lambda entries=entries: entries.extend(receiver.take_entries()) or entries)
            receiver.deliver(name, bytes.fromhex(value))
            for own, told in entries:
                process.stdin.write(f"{own} {told.hex()}\n")
            process.stdin.flush()
        receiver.post(data(0))
        time.sleep(0.05)
        assert not receiver.error
        process.send_signal(signal.SIGKILL)
        until(lambda: receiver.error)
    assert receiver.join(HANG_GUARD_S) and not receiver.take_finished()


def test_of_a_group_that_is_over_no_thread_and_no_socket_is_left(groups: Groups) -> None:
    """A node outlives any number of its peers."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(set(listeners()))

    before = held()
    receiver, sender = groups(RECEIVER), groups(SENDER)
    connect(receiver, sender)
    receiver.post(data(0))
    sender.post(data(1))
    assert len(taken(receiver, 1)) == len(taken(sender, 1)) == 1
    assert held() > before
    receiver.post(data(0))  # under way when it ends
    for group in (receiver, sender):
        group.abort(HandoffFailed("the peer is proven dead"))
        assert group.join(HANG_GUARD_S)
    until(lambda: held() <= before)


def test_nothing_listens_but_the_groups_own_port_on_its_host(groups: Groups) -> None:
    """Entries come through `deliver`: no store of torch's opens a port."""
    before = set(listeners())
    receiver, sender = groups(RECEIVER), groups(SENDER)
    connect(receiver, sender)
    receiver.post(data(0))
    sender.post(data(1))
    assert len(taken(receiver, 1)) == len(taken(sender, 1)) == 1, "both have dialled: gloo hears no abort while it does"
    opened = set(listeners()) - before
    assert len(opened) == 2
    for port in opened:
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", port)) != 0, "bound to one address, not to all"


# the store


def test_whoever_waits_for_an_entry_gets_it_or_the_failure() -> None:
    told: list[tuple[str, bytes]] = []
    store = LinkStore(lambda *entry: told.append(entry))
    store.set("a/0", b"mine")
    assert told == [("a/0", b"mine")] and store.get("a/0") == b"mine" and store.check(["a/0"])
    threading.Timer(0.02, store.deliver, ("a/1", b"your")).start()
    assert store.get("a/1") == b"your"
    store.deliver("a/1", b"evil")
    assert store.get("a/1") == b"your", "the first one stays"
    threading.Timer(0.02, store.fail, (HandoffFailed("gone"),)).start()
    with pytest.raises(HandoffFailed, match="gone"):
        store.wait(["a/2"])


def test_an_address_of_another_shape_never_reaches_the_library() -> None:
    store = LinkStore(lambda name, value: None)
    store.set("0/0", bytes(170))
    store.deliver("0/1", bytes(171))
    with pytest.raises(HandoffFailed, match="171 bytes, ours 170"):
        store.get("0/1")


def test_a_peer_can_not_fill_the_store() -> None:
    store = LinkStore(lambda name, value: None)
    for i in range(MAX_ENTRIES + 10):
        store.deliver(f"{i}", b"x")
    assert not store.check([f"{MAX_ENTRIES}"])


def test_what_torch_lacks_is_said() -> None:
    for name in ("nccl", "pigeon"):
        with pytest.raises(ConfigError, match=name):
            make_torch_group(name, HOST, CPU)


# nodes


@pytest.mark.parametrize("layer_ends", [(), (1,)])
def test_streams_over_gloo(layer_ends: tuple[int, ...]) -> None:
    knobs = CoreKnobs(backend="cpu", chunk_size=32, layer_ends=layer_ends)
    wake = threading.Event()
    make = partial(open_group, host=HOST, device=CPU, wake=wake.set)
    p = make_node("prefill", "p0", knobs, transport="gloo", make_group=make)
    d = make_node("decode", "d0", knobs, transport="gloo", make_group=make)
    net = Net([p, d])
    jobs: list[Job] = draw_jobs(random.Random(5), 8)
    keys = [net.generate(p, one, d) for one in jobs]
    net.run_until_ended(keys)
    assert [net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    net.settle(p, d)
    assert wake.is_set()
    for node in (p, d):
        node.side.close()
        node.ctx.core.close()
