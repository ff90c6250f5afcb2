"""No connection takes more of a process than its bound: unread bytes, and descriptors of those who say nothing."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from shared.wire.zeromq import watch
from shared.wire.zeromq.tcp import Shears, inflow_of, inode_of
from shared.wire.zeromq.watch import Watch, WatchLimits

MIB = 1 << 20


def received(fd: int) -> int:
    inflow = inflow_of(fd)
    return 0 if inflow is None else inflow.received


class Ends:
    """A TCP connection on this machine, as it was accepted here."""

    def __init__(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            self.port: int = listener.getsockname()[1]
            self.far = socket.create_connection(listener.getsockname())
            self.near, _ = listener.accept()
        self.near.settimeout(5.0)

    @property
    def fd(self) -> int:
        return self.near.fileno()

    def say(self, count: int) -> None:
        """Bytes that come in and are read from the kernel, as libzmq does."""
        before = received(self.fd)
        self.far.sendall(bytes(count))
        left = count
        while left:
            left -= len(self.near.recv(left))
        assert received(self.fd) == before + count

    def is_shut(self) -> bool:
        self.far.settimeout(0.2)
        try:
            return self.far.recv(1) == b""
        except TimeoutError:
            return False


@pytest.fixture
def ends() -> Iterator[Callable[[], Ends]]:
    made: list[Ends] = []

    def make() -> Ends:
        made.append(Ends())
        return made[-1]

    yield make
    for one in made:
        one.far.close()
        one.near.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Memory:
    """Of this process, in bytes."""

    size = 0

    def __call__(self) -> int:
        return self.size


def watch_of(clock: Clock, *, encrypted: bool = False, memory: Memory | None = None, **limits: float) -> Watch:
    fields = {"unread_bytes": 1000, "unread_bytes_in_all": 10_000, "silent_s": 10.0, "heartbeat_s": 1.0}
    made = WatchLimits(**(fields | limits))  # type: ignore[arg-type]
    return Watch(made, is_encrypted=encrypted, clock=clock, process_bytes=memory or Memory())


# ---- bytes


def test_short_parts_count_for_what_libzmq_keeps_of_each(ends: Callable[[], Ends]) -> None:
    """A part of one byte takes 3 on the wire and 128 more of memory."""
    own, one = watch_of(Clock()), ends()
    own.accepted(one.fd, one.port)
    one.say(3 * watch.MANY_PARTS + 22)
    own.delivered(one.fd, [1] * watch.MANY_PARTS, "a@1")
    own.look()
    assert own.take_refused() == [] and own._connections[one.fd].unread == 22, "below 1000 / (1 + 128 / 3)"
    one.say(1)
    own.look()
    assert one.is_shut() and [reason for reason, _ in own.take_refused()] == ["flood"]


def test_pages_behind_short_messages_are_no_flood(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock()), ends()
    own.accepted(one.fd, one.port)
    one.say(3 * (watch.MANY_PARTS - 1) + 200)
    own.delivered(one.fd, [1] * (watch.MANY_PARTS - 1), "a@1")
    own.look()
    one.say(800)
    own.look()
    assert own.take_refused() == [], "at the border"


def swelling(
    ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch, clock: Clock | None = None
) -> tuple[Watch, Memory, Ends]:
    """A connection with 1,000 bytes unread. Before its last byte came memory grew, too."""
    monkeypatch.setattr(watch, "MUCH_BYTES", 100)
    memory, one, clock = Memory(), ends(), clock or Clock()
    own = watch_of(clock, memory=memory, unread_bytes=5000, unread_bytes_in_all=10_000, heartbeat_s=math.inf)
    own.accepted(one.fd, one.port)
    one.say(100)
    memory.size += 50_000
    own.look()
    one.say(900)
    own.look()
    clock.now += 2 * watch.SWELLING_S  # now these bytes explain no growth
    own.look()
    return own, memory, one


def test_an_unfinished_message_may_not_swell_memory(ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    own, memory, one = swelling(ends, monkeypatch)
    one.say(1000)
    memory.size += 10_000
    own.look()
    assert own.take_refused() == [], "at the border of all unread bytes"
    one.say(600)  # 2,600 unread, which may take four times that
    memory.size += 400
    own.look()
    assert own.take_refused() == [], "at the border of four times the unread bytes"
    one.say(1)
    memory.size += 5
    own.look()
    assert one.is_shut() and [reason for reason, _ in own.take_refused()] == ["flood"]


@pytest.mark.parametrize("late", [False, True])
def test_memory_may_swell_some_time_after_the_bytes_came(
    ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The defect: growth counted only in looks that saw bytes come. libzmq was often later, so most growth was free."""
    clock = Clock()
    own, memory, one = swelling(ends, monkeypatch, clock)
    one.say(200)
    own.look()
    clock.now += watch.SWELLING_S + (0.01 if late else 0.0)
    memory.size += 10_001
    own.look()
    assert one.is_shut() is not late


def test_memory_grown_before_a_delivery_is_no_swelling(
    ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, memory, one = swelling(ends, monkeypatch)
    for _ in range(3):
        one.say(500)
        memory.size += 8_000
        own.delivered(one.fd, [500], "a@1")
        own.look()
        assert own.take_refused() == [] and own._connections[one.fd].unread > 100


def test_memory_that_others_take_is_no_swelling(ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    """While a node computes, pages wait for it and its memory grows: only bytes that come can swell it, 64 times."""
    own, memory, one = swelling(ends, monkeypatch)
    for number in range(3):
        one.say(50)
        memory.size += 100_000
        own.look()
        assert own.take_refused() == []
        assert own._connections[one.fd].swollen == (number + 1) * 50 * watch.MOST_SWELLING
        memory.size += 100_000
        own.look()
        assert own.take_refused() == []


def long_handshakes(
    ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> tuple[Watch, Memory, list[Ends]]:
    """Two callers, each with so many bytes and without a message."""
    monkeypatch.setattr(watch, "LONG_HANDSHAKE_BYTES", 100)
    memory, both = Memory(), [ends(), ends()]
    own = watch_of(Clock(), memory=memory, unread_bytes_in_all=10_000)
    for one, size in zip(both, sizes, strict=True):
        own.accepted(one.fd, one.port)
        one.say(size)
    own.look()
    return own, memory, both


@pytest.mark.parametrize("speaks", [False, True])
def test_the_longest_handshake_ends_once_memory_grew(
    ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    own, memory, both = long_handshakes(ends, monkeypatch, (150, 300))
    if speaks:
        for one in both:
            one.say(3)
            own.delivered(one.fd, [1], "a@1")
    memory.size += 10_000
    own.look()
    assert own.take_refused() == [], "at the border"
    memory.size += 1
    own.look()
    assert not both[0].is_shut() and both[1].is_shut(), "150 bytes can't take 10,000"
    assert [reason for reason, _ in own.take_refused()] == ["flood"]


def test_a_first_message_is_no_handshake_once_delivered(
    ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, memory, both = long_handshakes(ends, monkeypatch, (300, 100))
    own.delivered(both[0].fd, [200], "a@1")
    own.look()
    memory.size += 1_000_000
    own.look()
    assert own.take_refused() == []
    both[0].say(300)
    memory.size += 1_000_000
    own.look()
    assert own.take_refused() == [], "what follows is no handshake"


def test_so_much_may_come_before_a_first_message(ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MOST_BEFORE_MESSAGE", 500)
    own, _, both = long_handshakes(ends, monkeypatch, (500, 400))
    assert own.take_refused() == [], "at the border"
    both[1].say(101)
    own.look()
    assert not both[0].is_shut() and both[1].is_shut()


# ---- mute


def test_a_mute_caller_is_closed_and_not_refused(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock(), mute_s=0.2), ends()
    own.accepted(one.fd, one.port)
    one.say(10)
    own.delivered(one.fd, [8], "a@1")
    own.look()
    assert not one.is_shut()
    time.sleep(0.3)
    own.look()
    assert one.is_shut() and own.take_refused() == []


def test_who_said_nothing_yet_is_silent_and_not_mute(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock(), mute_s=0.05), ends()
    own.accepted(one.fd, one.port)
    one.say(10)
    time.sleep(0.1)
    own.look()
    assert not one.is_shut()


def test_whom_we_dialled_is_pinged_by_libzmq(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock(), mute_s=0.05), ends()
    own.dialled(one.fd, one.near.getpeername()[1])
    own.delivered(one.fd, [8], "a@1")
    time.sleep(0.1)
    own.look()
    assert not one.is_shut()


def test_a_peer_whose_bytes_wait_for_us_is_not_mute(ends: Callable[[], Ends]) -> None:
    """Its pings don't come through while a full inbox keeps libzmq from reading."""
    own, one = watch_of(Clock(), mute_s=0.05), ends()
    own.accepted(one.fd, one.port)
    own.delivered(one.fd, [], "a@1")
    one.far.sendall(b"ping")
    time.sleep(0.1)
    own.look()
    assert not one.is_shut()
    one.near.recv(4)
    own.look()
    assert one.is_shut()


def test_what_nobody_has_read_has_a_bound(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock()), ends()
    own.accepted(one.fd, one.port)
    one.say(1000)
    own.look()
    assert own.take_refused() == [] and not one.is_shut(), "at the border"
    one.say(1)
    own.look()
    assert [reason for reason, _ in own.take_refused()] == ["flood"] and one.is_shut()
    own.look()
    assert own.take_refused() == [], "once"


def test_what_was_delivered_counts_no_more(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock()), ends()
    own.accepted(one.fd, one.port)
    for _ in range(10):
        one.say(900)
        own.look()
        own.delivered(one.fd, [255, 634], "a@1")  # with headers of 2 and 9
        own.look()
    assert own.take_refused() == [] and own._connections[one.fd].unread == 0


def test_encrypted_parts_have_longer_headers(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock(), encrypted=True), ends()
    own.accepted(one.fd, one.port)
    one.say((222 + 33 + 2) + (223 + 33 + 9))
    own.delivered(one.fd, [222, 223], "a@1")
    own.look()
    assert own._connections[one.fd].unread == 0


def test_a_silent_time_is_no_credit(ends: Callable[[], Ends]) -> None:
    clock = Clock()
    own, one = watch_of(clock), ends()
    own.accepted(one.fd, one.port)
    own.delivered(one.fd, [100], "a@1")
    clock.now += 3600.0
    own.look()
    one.say(1001)
    own.look()
    assert one.is_shut()


def test_heartbeats_never_add_up(ends: Callable[[], Ends]) -> None:
    """They are received and never delivered."""
    clock = Clock()
    own, one = watch_of(clock), ends()
    own.accepted(one.fd, one.port)
    own.delivered(one.fd, [], "a@1")
    for _ in range(50):
        clock.now += 1.0
        one.say(100)
        own.look()
    assert own._connections[one.fd].unread == 0


def test_all_connections_together_have_a_bound(ends: Callable[[], Ends]) -> None:
    """The largest goes first."""
    own, both = watch_of(Clock(), unread_bytes_in_all=1500), [ends(), ends()]
    for one, count in zip(both, (700, 800), strict=True):
        own.accepted(one.fd, one.port)
        one.say(count)
    own.look()
    assert own.take_refused() == [], "at the border"
    both[0].say(1)
    own.look()
    assert not both[0].is_shut() and both[1].is_shut()


def test_who_dials_in_may_have_less(ends: Callable[[], Ends]) -> None:
    limits = WatchLimits(1000, 10_000, caller_bytes=100, callers_bytes_in_all=150)
    own, called, callers = Watch(limits, is_encrypted=False, clock=Clock()), ends(), [ends(), ends(), ends()]
    own.dialled(called.fd, called.near.getpeername()[1])
    for one in callers:
        own.accepted(one.fd, one.port)
    called.say(1000)
    callers[0].say(100)
    callers[1].say(50)
    own.look()
    assert own.take_refused() == [], "at the borders"
    callers[2].say(1)
    own.look()
    assert [one.is_shut() for one in callers] == [True, False, False], "all of them together: the largest goes"
    callers[1].say(51)
    own.look()
    assert callers[1].is_shut() and not called.is_shut()


def test_after_a_burst_its_memory_is_given_back_once(ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: nodes keep what was freed, for the next pages, and a flood is no page: 512 MiB stayed for ever."""
    monkeypatch.setattr(watch, "MUCH_BYTES", 10)
    monkeypatch.setattr(watch, "BURST_BYTES", 100)
    clock, given = Clock(), list[float]()
    own = Watch(
        WatchLimits(1000, 1000),
        is_encrypted=False,
        clock=clock,
        after_burst=lambda: given.append(clock.now),
        process_bytes=Memory(),
    )
    one = ends()
    own.accepted(one.fd, one.port)
    one.say(99)
    assert own.look() == 99
    own.delivered(one.fd, [97], "a@1")
    clock.now += watch.CALM_S
    own.look()
    assert given == [], "no burst"
    one.say(2000)
    own.look()
    assert one.is_shut()
    clock.now += watch.CALM_S - 0.1
    own.look()
    assert given == [], "it may go on"
    for _ in range(3):
        clock.now += 0.1
        own.look()
    assert len(given) == 1


# ---- descriptors


def test_who_says_nothing_is_hung_up(ends: Callable[[], Ends]) -> None:
    clock = Clock()
    own, mute, speaker, called = watch_of(clock), ends(), ends(), ends()
    own.accepted(mute.fd, mute.port)
    own.accepted(speaker.fd, speaker.port)
    own.dialled(called.fd, called.near.getpeername()[1])
    own.delivered(speaker.fd, [5], "a@1")
    clock.now += 10.0
    own.look()
    assert own.take_refused() == [], "at the border"
    clock.now += 0.01
    own.look()
    assert [reason for reason, _ in own.take_refused()] == ["idle"]
    assert mute.is_shut() and not speaker.is_shut() and not called.is_shut()


def test_too_many_silent_ones_push_the_oldest_out(ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_SILENT", 2)
    clock = Clock()
    own, all_ends = watch_of(clock), [ends() for _ in range(3)]
    for one in all_ends[:2]:
        own.accepted(one.fd, one.port)
        clock.now += 0.1
    own.look()
    assert own.take_refused() == [], "at the border"
    own.accepted(all_ends[2].fd, all_ends[2].port)
    own.look()
    assert [one.is_shut() for one in all_ends] == [True, False, False]


@pytest.mark.parametrize("epochs", [0, 1], ids=["one epoch", "two epochs"])
def test_a_peer_has_a_few_connections(ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch, epochs: int) -> None:
    monkeypatch.setattr(watch, "MAX_OF_ONE_PEER", 2)
    own, all_ends = watch_of(Clock()), [ends() for _ in range(4)]
    for index, one in enumerate(all_ends):
        own.accepted(one.fd, one.port)
        own.delivered(one.fd, [5], "b@1" if index == 3 else f"a@{1 + index // 2 * epochs}")
    assert [one.is_shut() for one in all_ends] == [True, False, False, False]
    for one in all_ends:
        own.accepted_closed(one.fd)
    assert not own._of_peer and not own._connections


# ---- descriptors that are another's


def test_only_the_socket_that_was_accepted_is_shut_down(ends: Callable[[], Ends]) -> None:
    one, other, shears = ends(), ends(), Shears()
    inode = inode_of(one.fd)
    assert inode is not None
    os.dup2(other.fd, one.fd)  # closed, and its number given to another
    assert not shears.shut_down(one.fd, inode) and not other.is_shut()
    shears.close()


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_flood_ends_without_a_free_descriptor(ends: Callable[[], Ends]) -> None:
    """The defect: whoever held all descriptors could flood; and a look that opened a file ended the watch."""
    own, one = Watch(WatchLimits(1000, 10_000), is_encrypted=False, clock=Clock()), ends()
    own.accepted(one.fd, one.port)
    one.say(1001)
    with no_free_descriptor():
        own.look()
    assert one.is_shut()
    own.close()


def test_a_descriptor_that_is_another_s_by_now_is_not_watched(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock()), ends()
    read_fd, write_fd = os.pipe()
    own.accepted(one.fd, one.port + 1)
    assert not own._connections
    own.dialled(one.fd, one.port)
    assert not own._connections
    own.accepted(read_fd, one.port)
    os.close(read_fd)
    os.close(write_fd)
    own.accepted(read_fd, one.port)
    assert not own._connections


def test_an_end_that_is_told_late_is_not_taken_for_another_s(ends: Callable[[], Ends]) -> None:
    """Descriptors are reused between a bound socket and dialled ones, whose events come apart."""
    own, one = watch_of(Clock()), ends()
    dialled = own.dialled(one.fd, one.near.getpeername()[1])
    own.accepted_closed(one.fd)
    assert own._connections[one.fd] is dialled
    own.accepted(one.fd, one.port)
    own.dialled_closed(dialled)
    assert own._connections[one.fd].must_speak
    own.accepted_closed(one.fd)
    assert not own._connections
