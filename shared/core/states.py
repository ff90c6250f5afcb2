"""The states that users see. Never change their values: they are metric labels, and words in messages and /admin."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words where these exist."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class PageState(StrEnum):
    """Each page of the pool is in exactly one state.

    Rows tag their pages. If a page has several tags, ACTIVE takes precedence over GRANTED, and GRANTED over HELD.
    """

    FREE = "free"
    CACHED = "cached"  # only in the prefix cache, so it can be evicted
    ACTIVE = "active"  # belongs to a row that prefills or decodes
    GRANTED = "granted"  # reserved; KV is coming
    HELD = "held"  # no step uses the page, but a pull or a copy may use it


class RowState(StrEnum):
    """Each row of the block table is in exactly one state."""

    FREE = "free"
    RUNNING = "running"
    PREFILLING = "prefilling"
    GRANTED = "granted"
    HELD = "held"


class QueueStage(StrEnum):
    """Where a request waits before its first decode step."""

    ROUTER = "router"
    BOOTSTRAP = "bootstrap"  # prefill node: offered, not granted yet
    WAITING = "waiting"  # waits for memory
    INFLIGHT = "inflight"  # prefill node: granted, not installed yet
    PREALLOC = "prealloc"  # decode node: offered, no memory yet
    TRANSFER = "transfer"  # decode node: granted, some pages are missing
    PREBUILT = "prebuilt"  # decode node: all pages are here, not installed yet


class NodeState(StrEnum):
    READY = "ready"
    SILENT = "silent"
    DRAINING = "draining"
    AVOIDED = "avoided"  # the circuit breaker is open after failed requests


Tag = Literal[PageState.ACTIVE, PageState.GRANTED, PageState.HELD]  # a row gives its pages one of these tags
TAGS: tuple[Tag, ...] = (PageState.ACTIVE, PageState.GRANTED, PageState.HELD)
