"""Ports for servers of tests."""

from __future__ import annotations

import socket

import pytest

from tests.support.machine import ports


def test_neighbours_are_free_and_never_given_to_connections():
    port = ports.free_port(3)
    assert ports.FIRST <= port < ports.END < 32768
    for number in range(port, port + 3):
        socket.create_server(("127.0.0.1", number)).close()


def test_a_taken_neighbour_rules_a_port_out(monkeypatch):
    port = ports.free_port(3)
    monkeypatch.setattr(ports, "FIRST", port)
    monkeypatch.setattr(ports, "END", port + 2)
    with socket.create_server(("127.0.0.1", port + 1)), pytest.raises(AssertionError, match="no 2 neighbouring ports"):
        ports.free_port(2)
    assert ports.free_port(2) in (port, port + 1)
