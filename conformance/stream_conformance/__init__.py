"""The contract for exactly-once streams: rules that test it, a reference server, clients that resume."""

from __future__ import annotations
