"""Defines the states that users see. Their values are metric labels and words in messages and /admin, so never change
them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class FinishReason(StrEnum):
    """The reasons why a sequence ended, in OpenAI's words where these exist."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class PageState(StrEnum):
    """States of a KV page. Each page of the pool is in exactly one state.

    Rows tag their pages. If a page has several tags, ACTIVE takes precedence over GRANTED, and GRANTED over HELD.
    """

    FREE = "free"
    CACHED = "cached"  # The page is only in the prefix cache, so it can be evicted.
    ACTIVE = "active"  # The page belongs to a row that prefills or decodes.
    GRANTED = "granted"  # The page is reserved, and its KV is coming.
    HELD = "held"  # No step uses the page, but a pull or a copy may use it.


class RowState(StrEnum):
    """States of a row of the block table. Each row is in exactly one state."""

    FREE = "free"
    RUNNING = "running"
    PREFILLING = "prefilling"
    GRANTED = "granted"
    HELD = "held"


class QueueStage(StrEnum):
    """Where a request waits before its first decode step."""

    ROUTER = "router"
    BOOTSTRAP = "bootstrap"  # Prefill node: the request is offered, but not granted yet.
    WAITING = "waiting"  # The request waits for memory.
    INFLIGHT = "inflight"  # Prefill node: the request is granted, but not installed yet.
    PREALLOC = "prealloc"  # Decode node: the request is offered, but has no memory yet.
    TRANSFER = "transfer"  # Decode node: the request is granted, but some pages are missing.
    PREBUILT = "prebuilt"  # Decode node: all pages are here, but the request is not installed yet.


class NodeState(StrEnum):
    READY = "ready"
    SILENT = "silent"
    DRAINING = "draining"
    AVOIDED = "avoided"  # the node's circuit breaker is open after failed requests


Tag = Literal[PageState.ACTIVE, PageState.GRANTED, PageState.HELD]  # a row gives its pages one of these tags
TAGS: tuple[Tag, ...] = (PageState.ACTIVE, PageState.GRANTED, PageState.HELD)
