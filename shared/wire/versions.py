"""The protocol's version, what each version brought, and which versions work side by side.

Versions N and N - 1 share a cluster while it is upgraded. The first message to a peer is written before the peer's
version is known. So readers skip fields that they don't know, and a new field has a default for older senders. Only
messages and sampling parameters, which a reader must not skip, depend on the receiver's version
(docs/adr/0011-neighbours.md).
"""

from __future__ import annotations

PROTOCOL_VERSION = 15
FIRST = 14  # earlier versions work only with themselves
# The version that brought a message ("Cheer") or a field ("Heartbeat.taken"). A new field has a default and comes last.
# A row may go once the version before it is two behind.
SINCE: dict[str, int] = {
    "Generate.tenant": 15,
    "Generate.trace": 15,
    "Heartbeat.adapter_orders": 15,
    "Heartbeat.taken": 15,
    "Hello.short_context": 15,
    "Hello.weights": 15,
    "Keep": 15,
    "LoadAdapter": 15,
    "NodeLoad.kept_pages": 15,
    "Offer.tenant": 15,
    "Offer.trace": 15,
    "RemoveAdapter": 15,
}
# Fields that senders still write, and the version whose readers no longer need them. The next version deletes them.
GONE: dict[str, int] = {}


def work_together(one: int, other: int) -> bool:
    """Return whether processes of these two versions understand each other."""
    return one == other or (abs(one - other) == 1 and min(one, other) >= FIRST)


def knows(version: int, name: str) -> bool:
    """Return whether a peer of this version knows what SINCE names. A peer that has said no version has version 0."""
    return version >= SINCE.get(name, 0)
