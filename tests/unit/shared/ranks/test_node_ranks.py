"""A node and its other ranks: what they say to one another, whose end is whose, and the memory that they share."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shared.config.processes import NodeProcessConfig
from shared.core.errors import BatonError, ConfigError, DeviceLost, ModelChanged, RankLost
from shared.core.exit_codes import EXIT_CONFIG
from shared.device.group import as_bytes
from shared.kv.pool import KVPool, map_pool
from shared.model.hashlm.model import HashLM
from shared.node import run
from shared.node.loop.daemon import Daemon
from shared.observe.log import Logger
from shared.ranks import follower, process
from shared.ranks import leader as ranks
from shared.ranks.leader import Follower, RankProcesses
from shared.ranks.orders import Done, Pages, hear, tell
from shared.wire.peers import Inbound
from tests.support.cores.core_rig import CoreKnobs
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.node_pair import make_node

UNUSABLE = "rank 1 can't work as configured: its last log line says why"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_whole_and_one_by_one(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    tell(ours, Pages(3, 16, 4096))
    tell(ours, Done())
    assert hear(theirs, Pages) == Pages(3, 16, 4096)
    assert hear(theirs, Done) == Done()


@pytest.mark.parametrize("said", [b"", b"\x05", (100).to_bytes(8, "little") + b"half of it"])
def test_a_peer_that_parts_says_nothing_more(pair: tuple[socket.socket, socket.socket], said: bytes) -> None:
    ours, theirs = pair
    ours.sendall(said)
    ours.close()
    assert hear(theirs, Pages) is None


def test_a_peer_that_is_late_or_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.settimeout(0.01)
    assert hear(theirs, Done) is None
    ours.close()
    with pytest.raises(RankLost, match="takes no messages"):
        tell(theirs, Done())


def test_ranks_write_the_same_pages_until_the_pool_is_sealed() -> None:
    planes = HashLM().kv_planes(4)
    pool = KVPool(planes, 5, 4, shared=True, sealed=False)
    other = KVPool(planes, 5, 4, memory=map_pool(os.dup(pool.fd), 5, pool.page_bytes))
    assert other.nonce == pool.nonce
    other.plane("kv")[2, 1, 3] = 77
    pool.plane("kv")[4, 0, 0] = 78
    assert pool.plane("kv")[2, 1, 3] == 77 and other.plane("kv")[4, 0, 0] == 78
    pool.seal()
    with pytest.raises(OSError, match="not permitted"):
        map_pool(os.dup(pool.fd), 5, pool.page_bytes)
    other.plane("kv")[2, 1, 3] = 79
    assert pool.plane("kv")[2, 1, 3] == 79, "whoever had it keeps it"
    assert np.count_nonzero(pool.page_view(1)) == 0
    pool.close()
    other.close()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankProcesses]:
    """With one follower that does nothing, and hears nothing either."""
    monkeypatch.setattr(ranks, "FAREWELL_S", 0.02)
    processes = RankProcesses(NodeProcessConfig(), "decode-0")
    ours, theirs = socket.socketpair()
    processes._followers.append(Follower(1, subprocess.Popen(["sleep", "60"]), ours))
    with theirs:
        yield processes
        processes.close()


def test_a_rank_that_does_not_end_is_ended(processes: RankProcesses) -> None:
    (one,) = processes._followers
    processes.check_ranks()
    processes.close()
    assert one.process.returncode == -signal.SIGKILL
    processes.close()


def test_what_the_device_runs_for_a_lost_rank_is_ended_first(processes: RankProcesses) -> None:
    """Its kernels would wait for the rank, and whoever waits for the device would, too."""
    (one,), ended = processes._followers, []
    group: Any = SimpleNamespace(abort=lambda: ended.append(one.process.poll()))
    processes._group = group
    processes.close()
    assert ended == [None]


def test_a_lost_rank_is_given_up_unless_the_node_ends(
    processes: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop may wait for it where nothing else tells."""
    (one,), told = processes._followers, []
    monkeypatch.setattr(ranks, "LOOK_S", 0.01)
    monkeypatch.setattr(ranks, "GIVE_UP_S", HANG_GUARD_S)
    watch, check = threading.Thread(target=processes._watch, args=(told.append,)), processes.check_ranks
    looks = threading.Event()

    def look() -> None:
        looks.set()
        check()

    monkeypatch.setattr(processes, "check_ranks", look)
    one.process.kill()
    one.process.wait()
    watch.start()
    assert looks.wait(HANG_GUARD_S)
    processes.close()
    watch.join(HANG_GUARD_S)
    assert not watch.is_alive() and not told, "the node ends by itself"
    processes._closed.clear()
    processes._followers.append(one)
    monkeypatch.setattr(ranks, "GIVE_UP_S", 0.01)
    processes._watch(told.append)
    assert [str(error) for error in told] == ["rank 1 ended with status -9"]


def test_orders_wait_as_long_as_the_group(processes: RankProcesses) -> None:
    """A device may have steps of more than `silence_s` ahead of an order."""
    (one,) = processes._followers
    group: Any = SimpleNamespace(be_patient=lambda seconds: seconds + 55, abort=lambda: None)
    processes._group = group
    pool: Any = SimpleNamespace()
    processes.make_pages = lambda pool: None  # type: ignore[method-assign]
    processes.share(pool)
    assert one.orders.gettimeout() == NodeProcessConfig().parts.node.silence_s + 55


@pytest.mark.parametrize("closes", [True, False])
def test_a_rank_tells_what_rank_0_does_not_find(
    pair: tuple[socket.socket, socket.socket], closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that all ranks find is told once: rank 0 tells it, and closes the socket."""
    ours, theirs = pair
    said, nothing = io.StringIO(), Any

    def fail(*_: object) -> None:
        raise ConfigError("this GPU has no room")

    monkeypatch.setattr(follower, "follow_to_the_end", fail)
    monkeypatch.setattr(process, "SAME_ERROR_S", 0.01)
    if closes:
        ours.close()
    assert process.run(nothing, theirs, 1, Logger("d0.1", said)) == EXIT_CONFIG
    assert ("this GPU has no room" in said.getvalue()) is not closes


@pytest.mark.parametrize(
    ("error", "code"), [(RankLost("rank 1 ended with status -9"), 1), (ConfigError("no room"), EXIT_CONFIG)]
)
def test_a_process_that_is_given_up_ends_with_a_sentence(
    error: BatonError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, ended = io.StringIO(), []
    monkeypatch.setattr(run.os, "_exit", ended.append)
    run.end_process(Logger("d0", said), error)
    assert ended == [code]
    assert said.getvalue().endswith(f'go on error="{error}"\n')


class Ending:
    """A rank's process that has not ended at the first look."""

    def __init__(self, status: int) -> None:
        self.looks = iter([None])
        self.status = status

    def poll(self) -> int | None:
        return next(self.looks, self.status)

    def wait(self, timeout: float) -> int:
        return self.status


def with_follower(processes: RankProcesses, process: Any) -> None:
    """Put it in the place of the first one."""
    processes._followers.insert(0, Follower(1, process, socket.socket()))


def test_a_rank_s_config_error_ends_the_node_for_good(
    processes: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is started again would end in the same way."""
    told: list[BatonError] = []
    monkeypatch.setattr(ranks, "LOOK_S", 0.01)
    monkeypatch.setattr(ranks, "GIVE_UP_S", 0.01)
    with_follower(processes, Ending(EXIT_CONFIG))
    processes._watch(told.append)
    assert [(type(error), str(error)) for error in told] == [(ConfigError, UNUSABLE)]


@pytest.mark.parametrize("first", [1, None])
def test_a_rank_s_config_error_counts_wherever_it_is(first: int | None, processes: RankProcesses) -> None:
    """The other ranks end, too, or would if they did not wait for it."""
    with_follower(processes, Ending(EXIT_CONFIG))
    if first is not None:
        with_follower(processes, Ending(first))
    processes.wait_for_end()
    with pytest.raises(ConfigError, match=UNUSABLE):
        processes.check_ranks()


@pytest.mark.parametrize("is_loading", [True, False])
def test_a_rank_that_is_about_to_end_is_waited_for_in_loading(is_loading: bool, processes: RankProcesses) -> None:
    """Its connections close first. Later, clients would wait, too."""
    said, closed = io.StringIO(), RankLost("rank 0 of 2, waiting: closed")
    with_follower(processes, Ending(EXIT_CONFIG))
    if is_loading:
        with pytest.raises(ConfigError, match=UNUSABLE):
            run.tell_end(Logger("d0", said), closed, processes, is_loading=True)
        assert not said.getvalue()
    else:
        run.tell_end(Logger("d0", said), closed, processes, is_loading=False)
        assert said.getvalue().count("\n") == 1 and f"RankLost: {closed}" in said.getvalue()


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (DeviceLost("a fault"), ["DeviceLost: a fault", "rank 1 ended with status 1"]),
        (RankLost("rank 0 failed: a fault"), ['error="rank 0 failed: a fault"', "rank 1 ended with status 1"]),
        (ModelChanged("other files"), ['error="other files"', "rank 1 ended with status 1"]),
        (RankLost("rank 1 ended with status 1"), ["rank 1 ended with status 1"]),
    ],
)
def test_a_lost_rank_hides_no_error_of_rank_0(error: BatonError, lines: list[str], processes: RankProcesses) -> None:
    said, ending = io.StringIO(), Ending(1)
    ending.poll()
    with_follower(processes, ending)
    run.tell_end(Logger("d0", said), error, processes, is_loading=False)
    found = said.getvalue().splitlines()
    assert len(found) == len(lines) and all(line in one for one, line in zip(found, lines, strict=True))


@pytest.mark.parametrize(
    ("error", "line"),
    [(DeviceLost("a fault"), "DeviceLost: a fault"), (RankLost("rank 0 failed: its connection closed"), "")],
)
def test_nor_does_a_rank_s_config_error(error: BatonError, line: str, processes: RankProcesses) -> None:
    """But the loss of a rank is what it explains."""
    said, ending = io.StringIO(), Ending(EXIT_CONFIG)
    ending.poll()
    with_follower(processes, ending)
    with pytest.raises(ConfigError, match=UNUSABLE):
        run.tell_end(Logger("d0", said), error, processes, is_loading=False)
    assert said.getvalue().count("\n") == bool(line) and line in said.getvalue()


class NoLinks:
    def __init__(self) -> None:
        self.polls = 0

    def poll(self, timeout_s: float) -> Sequence[Inbound]:
        self.polls += 1
        return ()

    def send(self, *_: object) -> bool:
        return True


def test_a_node_whose_rank_has_ended_ends(processes: RankProcesses) -> None:
    """With nothing to do it would not notice by itself."""
    (one,) = processes._followers
    node = make_node("decode", "d0", CoreKnobs())
    links, log = NoLinks(), Logger("d0", io.StringIO())
    daemon = Daemon(node, links, log, 1.0, lambda: 0.0, check=processes.check_ranks)  # type: ignore[arg-type]
    daemon.round()
    one.process.kill()
    one.process.wait()
    with pytest.raises(RankLost, match="rank 1 ended with status -9"):
        daemon.round()
    node.ctx.core.close()


@pytest.mark.parametrize("x", [torch.arange(6).view(2, 3), torch.ones(1, 1), torch.tensor([5])[:, None][:1]])
def test_tensors_travel_as_bytes_whatever_their_strides_say(x: torch.Tensor) -> None:
    """Of a single element any stride will do, and some libraries make it 0."""
    odd = x.as_strided(x.shape, (0,) * x.ndim) if x.numel() == 1 else x
    assert as_bytes(odd).numpy().tobytes() == x.numpy().tobytes()
