"""Hosts on one bridge, and what can happen to the cables between them. Knows nothing of what runs on a host.

    switch: a bridge with a port per host        host: lo, and eth0 with 10.77.0.N, at the other end of the port

Traffic stays between these hosts: there is no way out of the switch.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.drill.namespaces import Namespace, ip

NETWORK = "10.77.0"
NOBODY = "02:00:00:00:de:ad"  # an address on the wire that no card has: what is sent there is gone


class Host(Namespace):
    """One machine: a network stack with one cable to the switch."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__()
        self.name = name
        self.address = f"{NETWORK}.{number}"

    def plug_in(self, switch: Namespace) -> None:
        switch.do(ip, f"link add name {self.name} type veth peer name eth0 netns {self.path}")
        switch.do(ip, f"link set dev {self.name} master bridge up")
        for line in (f"addr add {self.address}/24 dev eth0", "link set dev eth0 up", "link set dev lo up"):
            self.do(ip, line)


class Site:
    """All hosts, by name, and the switch."""

    def __init__(self, names: Sequence[str]) -> None:
        self._switch = Namespace()
        self._switch.do(ip, "link add name bridge type bridge")
        self._switch.do(ip, "link set dev bridge up")
        self.hosts = {name: Host(name, number) for number, name in enumerate(names, start=1)}
        self._unplugged: set[str] = set()
        self._deaf: set[tuple[str, str]] = set()
        for host in self.hosts.values():
            host.plug_in(self._switch)

    def unplug(self, name: str) -> None:
        """Nothing goes in or out any more, and nobody is told: no FIN, no reset."""
        self._switch.do(ip, f"link set dev {name} down")
        self._unplugged.add(name)

    def plug_in(self, name: str) -> None:
        self._switch.do(ip, f"link set dev {name} up")
        self._unplugged.discard(name)

    def lose(self, sender: str, receiver: str) -> None:
        """What the one sends to the other is gone; the other way nothing changes. SYNs vanish like all the rest."""
        self._neighbour("replace", sender, receiver, f"lladdr {NOBODY} nud permanent")
        self._deaf.add((sender, receiver))

    def find(self, sender: str, receiver: str) -> None:
        """The sender looks for the receiver's true address again."""
        self._neighbour("del", sender, receiver)
        self._deaf.discard((sender, receiver))

    def _neighbour(self, action: str, sender: str, receiver: str, more: str = "") -> None:
        self.hosts[sender].do(ip, f"neigh {action} {self.hosts[receiver].address} {more} dev eth0")

    def mend(self) -> None:
        """Every cable is whole again."""
        for name in list(self._unplugged):
            self.plug_in(name)
        for sender, receiver in list(self._deaf):
            self.find(sender, receiver)

    def close(self) -> None:
        for namespace in (*self.hosts.values(), self._switch):
            namespace.close()
