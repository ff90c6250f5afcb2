"""Hand-offs between nodes whose pools are on a virtual GPU: the CPU's streams, through pinned memory, and no thread but
the transfers' waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from shared.node.loop.node import Node
from shared.sched.steps.prebuilt import Arrival
from shared.wire.messages import Installed, Prebuilt, Ready
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.gpus.cuda_core import Kind, make_core
from tests.support.gpus.cuda_jobs import jobs
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import VirtualGpu, make_device
from tests.support.worlds.node_pair import Net, make_node

KINDS = {
    "plain": Kind(),
    "n-gram": Kind(spec="ngram"),
    "chain": Kind(spec="chain"),
    "tree": Kind(spec="tree"),
    "int8 KV": Kind(kv="int8"),
}
WAVES = (1, 2, 3, 4)  # so many are installed at once
TOKENS = 4
KNOBS = CoreKnobs(page_size=16, max_running=8)


class Pair:
    """A prefill and a decode node, on the GPU or not, back to back."""

    def __init__(
        self,
        kind: Kind,
        gpu: VirtualGpu | None,
        on_gpu: str = "pd",
        transport: str = "zmq",
        graphs: bool = False,
    ) -> None:
        """`graphs`: of the prefill node."""

        def node(role: str) -> Node:
            own = gpu if role[0] in on_gpu else None
            is_prefill = role == "prefill"
            core = make_core(kind, own, shared_memory=transport == "shm" and is_prefill, graphs=graphs and is_prefill)
            return make_node(role, role[0], KNOBS, core=core, gpu=own, transport=transport)

        self.prefill, self.decode = node("prefill"), node("decode")
        self.net = Net([self.prefill, self.decode])
        self.admitted: list[int] = []
        admit = self.decode.ctx.core.loop.admit

        def counting(arrivals: Sequence[Arrival]) -> None:
            self.admitted.append(len(arrivals))
            admit(arrivals)

        self.decode.ctx.core.loop.admit = counting  # type: ignore[method-assign]

    def run(self, waves: Sequence[int] = WAVES) -> list[list[int]]:
        """The first jobs, in waves of so many. Their streams."""
        net, keys, left = self.net, [], short_jobs(sum(waves))
        for count in waves:
            wave, left = left[:count], left[count:]
            net.hold = lambda src, dst, message: isinstance(message, Prebuilt)
            keys += [net.generate(self.prefill, one, self.decode) for one in wave]
            self.until(lambda wave=wave: len(net.kept) == len(wave) and self.pulled)
            net.let_go()
        net.run_until_ended(keys)
        net.settle(self.prefill, self.decode)
        return [net.router.streams[key] for key in keys]

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + HANG_GUARD_S
        while not condition():
            assert time.monotonic() < end, "it never came"
            self.net.turn()

    @property
    def pulled(self) -> bool:
        """Pages of all that is granted are here."""
        return all(handoff.ranges.complete for handoff in self.decode.side.transfers.open.values())  # type: ignore[attr-defined]

    def close(self) -> None:
        for node in (self.prefill, self.decode):
            node.side.close()
            node.ctx.core.close()


def short_jobs(count: int) -> list[Job]:
    return [
        replace(job, sampling=replace(job.sampling, max_tokens=TOKENS, min_tokens=min(2, job.sampling.min_tokens)))
        for job in jobs(count)
    ]


@cache
def on_cpu(kind: Kind) -> list[list[int]]:
    pair = Pair(kind, None)
    streams = pair.run()
    pair.close()
    return streams


def assert_equal(pair: Pair, kind: Kind, waves: Sequence[int] = WAVES) -> None:
    """To the CPU's streams, and every wave was admitted as one."""
    streams = pair.run(waves)
    assert streams == on_cpu(kind)[: sum(waves)]
    assert pair.admitted == list(waves) and len(pair.net.messages(Installed)) == sum(waves)


@pytest.mark.parametrize(("name", "waves"), [("plain", WAVES), ("n-gram", (1, 3)), ("tree", (1, 3))])
def test_hand_offs_give_the_cpu_s_streams_and_block_no_loop(name: str, waves: tuple[int, ...]) -> None:
    """One and more of them admitted in one step."""
    gpu = make_device("eager")
    pair = Pair(KINDS[name], gpu)
    on_cpu(KINDS[name])
    with gpu.counting() as counts:
        assert_equal(pair, KINDS[name], waves)
    pair.close()
    told = f"{counts.by_thread}, {counts.by_place.most_common(8)}"
    print(f"{name}: {told}")
    assert counts.syncs == counts.h2d_pageable == counts.data_ptrs == 0, told
    waits = {thread for thread in counts.by_thread if thread.startswith("waits")}
    assert "waits MainThread" not in waits and "waits stream-transfer" in waits, told


IN_ANY_ORDER = [
    (0, "plain", "pd", WAVES), (1, "plain", "p", (1, 2)), (4, "plain", "d", (1, 2)), (6, "int8 KV", "pd", (3,)),
    (10, "n-gram", "d", (1, 4)), (11, "chain", "pd", (1, 2)), (8, "tree", "p", (1, 4)), (16, "tree", "d", (1, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("seed", "name", "on_gpu", "waves"), IN_ANY_ORDER)
def test_hand_offs_in_any_order_that_the_waits_allow(seed: int, name: str, on_gpu: str, waves: tuple[int, ...]) -> None:
    """A node on a CPU and one on a GPU are a pair, too."""
    gpu = make_device("deferring", seed)
    pair = Pair(KINDS[name], gpu, on_gpu)
    assert_equal(pair, KINDS[name], waves)
    pair.close()
    assert not gpu.races


def test_a_decode_node_on_a_gpu_reads_a_cpu_s_pool() -> None:
    gpu = make_device("deferring", 1)
    pair = Pair(KINDS["plain"], gpu, "d", transport="shm")
    assert_equal(pair, KINDS["plain"], (1, 2))
    pair.close()
    assert not gpu.races


def test_pools_that_are_read_where_they_lie() -> None:
    """The digests of `cuda_ipc` are waited for, by the transfers' thread."""
    gpu = make_device("deferring", 3)
    pair = Pair(KINDS["plain"], gpu, transport="cuda_ipc")
    with gpu.counting() as counts:
        assert_equal(pair, KINDS["plain"], (1, 2))
    pair.close()
    assert not gpu.races
    stops = {thread for thread in counts.by_thread if thread.partition(" ")[0] in ("syncs", "waits", "h2d_pageable")}
    assert "syncs stream-transfer" in stops and not any("MainThread" in thread for thread in stops), stops


@pytest.mark.parametrize("graphs", [False, True])
def test_layers_go_ahead_while_later_ones_are_computed(graphs: bool) -> None:
    """A graph tells of no layers: they go when it has run, ahead of the last one and of the sampling."""
    gpu = make_device("deferring", 2)
    pair = Pair(replace(KINDS["plain"], layer_ends=(1,)), gpu, graphs=graphs)
    assert_equal(pair, KINDS["plain"], (1, 2))
    runner = pair.prefill.ctx.core.graphs
    assert not graphs or (runner is not None and runner.graphed_prompts)
    pair.close()
    assert not gpu.races
    assert any(ready.num_layers for ready in pair.net.messages(Ready))
