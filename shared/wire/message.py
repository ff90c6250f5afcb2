"""The base of every message."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag_field="t"):
    """A message's tag is its class name."""
