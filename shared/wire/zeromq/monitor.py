"""Opens and reads monitors of ZMQ sockets, without blocking."""

from __future__ import annotations

from typing import cast

import zmq
from zmq.utils.monitor import recv_monitor_message


def open_monitor(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Open a monitor of the socket's events. Raise zmq.ZMQError if no descriptor is free.

    The monitor's queue has no limit: libzmq 4.3.5 would wait for room, holding a lock that all connections need."""
    address = f"inproc://monitor.{socket.FD}"
    socket.monitor(address, events)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.connect(address)
    return monitor


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Return whether input is waiting. Also arm the socket's edge-triggered descriptor."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def drain_monitor(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """Return (event, value) pairs in order. For ACCEPTED and DISCONNECTED the value is the descriptor."""
    events = []
    while has_input(monitor):
        event = recv_monitor_message(monitor, zmq.NOBLOCK)
        events.append((int(event["event"]), int(event["value"])))
    return events
