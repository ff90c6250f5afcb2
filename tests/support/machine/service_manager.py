"""A datagram socket in systemd's place, which hears what services say."""

from __future__ import annotations

import socket


class Manager:
    """`address`: a path, or a name after a zero byte."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)
        self.address = address

    def heard(self) -> list[list[str]]:
        """Return the messages since the last call, each as its lines."""
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return messages

    def fill(self) -> list[list[str]]:
        """Let the queue be full, as if systemd hung. Return what it holds."""
        messages = []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            while True:
                try:
                    sender.sendto(b"others", self.address)
                except BlockingIOError:
                    return messages
                messages.append(["others"])

    def close(self) -> None:
        self._socket.close()
