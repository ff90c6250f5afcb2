"""States that others see. Their values are labels of metrics, words on the wire or of /admin: they never change."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class FinishReason(StrEnum):
    """Why a sequence ended. The values are OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class PageState(StrEnum):
    """Of a KV page; a partition of the pool. A page shared by several rows counts for the first of ACTIVE, GRANTED and
    HELD that one of them is tagged with."""

    FREE = "free"
    CACHED = "cached"  # the prefix cache's alone: evictable
    ACTIVE = "active"  # of a row that prefills or decodes
    GRANTED = "granted"  # reserved, its KV is on its way here
    HELD = "held"  # no step uses it, but a pull or a copy may


class RowState(StrEnum):
    """Of a row of the block table; a partition of the rows."""

    FREE = "free"
    RUNNING = "running"
    PREFILLING = "prefilling"
    GRANTED = "granted"
    HELD = "held"


class QueueStage(StrEnum):
    """Where a request waits, on its way from the router to its first step on the decode node."""

    ROUTER = "router"
    BOOTSTRAP = "bootstrap"  # prefill node: offered, not granted
    WAITING = "waiting"  # for memory
    INFLIGHT = "inflight"  # prefill node: granted, not installed
    PREALLOC = "prealloc"  # decode node: offered, no memory
    TRANSFER = "transfer"  # decode node: granted, its pages are not all here
    PREBUILT = "prebuilt"  # decode node: its pages are here, its record is not, or it is not installed


class NodeState(StrEnum):
    """Of a node, as its router sees it."""

    READY = "ready"
    SILENT = "silent"
    DRAINING = "draining"
    AVOIDED = "avoided"  # requests there failed: its breaker is open


Tag = Literal[PageState.ACTIVE, PageState.GRANTED, PageState.HELD]  # what a row says of its pages
TAGS: tuple[Tag, ...] = (PageState.ACTIVE, PageState.GRANTED, PageState.HELD)
