"""The ranks of one node as threads of one process: the production group, orders and follower's loop, over gloo."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shared.core.errors import RankLost
from shared.device.group import RankGroup
from shared.kv.pool import KVPool
from shared.model.library import loading
from shared.model.math.interface import Model
from shared.ranks.dp import DPRanks, follow_dp
from shared.ranks.tp import Ranks, TPRanks, follow_tp
from tests.support.cores.core_rig import CoreKnobs, Job, assert_whole, make_core, run_local
from tests.support.cores.rank_threads import RankThreads
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.node_pair import Net, make_node

Load = Callable[[RankGroup], Model]


class Team(RankThreads):
    """`model` is what rank 0 loads, `ranks` what its worker needs; `share` gives the pool to ranks 1 .. size - 1."""

    def __init__(self, size: int, load: Load, by_rows: bool) -> None:
        super().__init__(size - 1)
        store = dist.HashStore()
        self._follow = follow_dp if by_rows else follow_tp
        self._pool: Future[KVPool] = Future()
        self.start(lambda rank, orders: self._main(store, rank, size, load, orders))
        self.group = RankGroup(store, 0, size, HANG_GUARD_S)
        self.model = load(self.group)
        self.ranks: Ranks = (DPRanks if by_rows else TPRanks)(self.group, self.sockets)

    def share(self, pool: KVPool) -> None:
        self._pool.set_result(pool)

    def _main(self, store: dist.Store, rank: int, size: int, load: Load, orders: socket.socket) -> None:
        torch.set_num_threads(1)
        try:
            group = RankGroup(store, rank, size, HANG_GUARD_S)
            self._follow(orders, group, load(group), self._pool.result())
        except RankLost as error:
            self.errors.append(error)
        finally:
            orders.close()


@contextlib.contextmanager
def followers(size: int, load: Load, *, by_rows: bool = False) -> Iterator[Team]:
    """`by_rows`: each rank has the whole model and some of the rows."""
    team = Team(size, load, by_rows)
    try:
        yield team
    finally:
        team.close()
        assert not team.errors, team.errors


def load_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library makes networks with settings of the whole process, and these ranks are threads of one."""
    lock = threading.Lock()

    def locked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            with lock:
                return function(*args, **more)

        return call

    for name in ("outline_of", "read_network"):
        monkeypatch.setattr(loading, name, locked(getattr(loading, name)))


def streams_of(model: Model, jobs: list[Job], num_pages: int, team: Team | None = None) -> dict[str, list[int]]:
    """With the scheduler, prefix hits and retraction; by all ranks of `team`, whose model it is, or by it alone."""
    knobs = CoreKnobs(chunk_size=16, num_pages=num_pages, backend="cpu")
    core = make_core(knobs, model=model, ranks=None if team is None else team.ranks)
    if team is not None:
        team.share(core.pool)
    try:
        outcome = run_local(core, jobs, retract_every=7, rng=random.Random(3))
        assert_whole(core)
        return dict(outcome.streams)
    finally:
        core.close()


def pair_streams(
    jobs: list[Job], sizes: tuple[int, int], load: Load, whole: Model, knobs: CoreKnobs
) -> list[list[int]]:
    """Prefilled on a node of one number of ranks, decoded on a node of another; nothing leaks."""
    nodes = []
    with contextlib.ExitStack() as stack:
        for role, size in zip(("prefill", "decode"), sizes, strict=True):
            team = stack.enter_context(followers(size, load)) if size > 1 else None
            model, ranks = (team.model, team.ranks) if team is not None else (whole, None)
            core = make_core(knobs, model=model, ranks=ranks)  # type: ignore[arg-type]
            stack.callback(core.close)
            if team is not None:
                team.share(core.pool)
            nodes.append(make_node(role, f"{role}-0", knobs, core=core))
        net = Net(nodes)
        keys = [net.generate(nodes[0], job, nodes[1]) for job in jobs]
        net.run_until_ended(keys)
        net.settle(*nodes)
        assert nodes[1].ctx.metrics.counters()["handoffs"] >= 3
        return [net.router.streams[key] for key in keys]
