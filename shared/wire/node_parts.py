"""The parts of a node's Hello and Heartbeat."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.observe.node_metrics import MAX_SAMPLES
from shared.wire.ranges import MAX_NAMES, Count, Name, Real, States, Text, Unsigned


class Fingerprint(msgspec.Struct, frozen=True):
    """Nodes pair only if their fingerprints fit (shared/wire/fitting.py)."""

    protocol: Count
    numerics: Count
    model: Text
    weights: Text
    dtype: Text
    page_size: Count
    page_layout: Text  # the planes of a page, in their order
    spec: Text  # identifies the draft state in pages and records, and the draft head's weights
    build: Text
    grammar: Text  # llguidance's version and the vocabulary's digest; without grammars "none" and why


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A loaded LoRA adapter. Requests and KV refer to its digest. Clients use its name."""

    name: Name
    digest: Name


class Weights(msgspec.Struct, frozen=True):
    """A model's weights in its files and in a node's memory, for people."""

    stored: Text  # number format in the files
    held: Text  # number format in memory
    file_bytes: Count
    memory_bytes: Count  # at most


OrderState = Literal["loading", "loaded", "refused", "leaving", "removed"]


class AdapterOrder(msgspec.Struct, frozen=True):
    """What has become of a LoadAdapter or RemoveAdapter."""

    number: Unsigned
    name: Name
    state: OrderState
    digest: Text = ""  # of the weights, once they are known
    why: Text = ""  # for "refused"
    requests: Count = 0  # that still use the weights, for "leaving"


class NodeLoad(msgspec.Struct, frozen=True):
    """`pages` add up to pages_total, and `rows` add up to rows_total."""

    pages_total: Count
    pages: States  # number of pages in each PageState
    rows_total: Count
    rows: States  # number of rows in each RowState
    waiting: Count
    waiting_tokens: Count
    spec_width: Count  # number of tokens per running row and step; 1 means no drafts
    # Totals since the epoch began, such as steps; they never fall.
    counters: Annotated[dict[Name, Real], Meta(max_length=MAX_NAMES)]
    # histogram samples since the last heartbeat, by metric name
    observations: Annotated[dict[Name, Annotated[list[Real], Meta(max_length=MAX_SAMPLES)]], Meta(max_length=MAX_NAMES)]
    # On a prefill node: the transport to each decode node, and the reason for it.
    hands_over: Annotated[dict[Name, Text], Meta(max_length=MAX_NAMES)]
    cores: Text  # text about own, lent and borrowed CPU cores; empty on a GPU
    kept_pages: Count = 0  # free or cached, but kept for the growth of answers under way
