"""Start, watch and end the node's other ranks for rank 0, and share pages with them.

    start --> Done: they are loading --> join the group, load --> pages --> Done: mapped --> forwards ... --> close.

On a CPU ranks map rank 0's pages. On GPUs each rank has a GPU of its own, which its process sees first, and makes as
many pages there as rank 0 has.

If a rank is lost, the whole node ends, within GIVE_UP_S even if rank 0 waits for that rank. A follower ends when its
socket closes, or when another rank does not join a collective in time. If rank 0 is killed, the kernel ends the
followers (shared/core/orphan_guard.py).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.config import core_plan
from shared.config.core_plan import CorePlan
from shared.config.machine.gpus import environment_with, visible_to_rank
from shared.config.processes import NodeProcessConfig
from shared.core import launcher
from shared.core.errors import BatonError, ConfigError, RankLost
from shared.core.exit_codes import EXIT_CONFIG
from shared.device.group import RankGroup, file_store, join_ranks
from shared.kv.pool import KVPool
from shared.ranks.dp import DPRanks
from shared.ranks.on_device import DeviceRanks
from shared.ranks.orders import Done, Measure, Pages, RankUse, Start, hear, tell
from shared.ranks.tp import Ranks, TPRanks

LOAD_S = 300.0  # seconds that ranks wait for each other while they load, at different speeds
FAREWELL_S = 2.0
LOOK_S = 0.5  # between two looks at the ranks' processes
LAST_LOOK_S = 0.02
GIVE_UP_S = 5.0  # from a rank's end on; then this process no longer waits for it


@dataclass(frozen=True, slots=True)
class Follower:
    rank: int
    process: subprocess.Popen[bytes]
    orders: socket.socket

    def wait_done(self) -> None:
        if hear(self.orders, Done) is None:
            raise RankLost(f"rank {self.rank} did not come up (exit status {self.process.poll()})")

    def wait_use(self) -> RankUse:
        use = hear(self.orders, RankUse)
        if use is None:
            raise RankLost(f"rank {self.rank} did not measure its memory (exit status {self.process.poll()})")
        return use


class RankProcesses:
    """The processes of ranks 1 to size - 1. Owned by the node's loop thread, which may wait for them in a collective.

    `give_up` gets the error, on a thread of its own, once a rank has ended and this object is not closed within
    GIVE_UP_S. It should end this process: NCCL and a rendezvous would go on waiting.
    """

    def __init__(
        self, config: NodeProcessConfig, node_id: str, give_up: Callable[[BatonError], None] | None = None
    ) -> None:
        self._config = config
        self._node_id = node_id
        self._folder = ""
        self._followers: list[Follower] = []
        # this object uses the group until all ranks have loaded; then only the forward stream uses it
        self._group: RankGroup | None = None
        self.model_group: RankGroup | None = None  # with tp the same group as `_group`, else None
        self.ranks: Ranks | None = None
        self._on_gpus = False
        self._give_up = give_up
        self._closed = threading.Event()

    def start(self, device: str) -> None:
        """Start the ranks on `device`, each on a GPU of its own unless it is "cpu".

        Return when all ranks have joined the group; the ranks then load the model."""
        size, is_dp = self._config.parts.parallel.num_ranks, self._config.parts.parallel.dp > 1
        if size == 1:
            return
        self._on_gpus = device != "cpu"
        self._folder = tempfile.mkdtemp(prefix="baton-ranks-")  # mode 0700
        store = str(Path(self._folder) / "store")
        for rank in range(1, size):
            self._followers.append(self._start_one(rank, store, device))
        if self._give_up is not None:
            threading.Thread(target=self._watch, args=(self._give_up,), daemon=True, name="rank-watch").start()
        for follower in self._followers:
            follower.wait_done()
        self._group = join_ranks(file_store(store, size), 0, size, LOAD_S, torch.device(device))
        orders = [follower.orders for follower in self._followers]
        if self._on_gpus:
            self.ranks = DeviceRanks(self._group, orders)
        else:
            self.ranks = DPRanks(self._group, orders) if is_dp else TPRanks(self._group, orders)
        self.model_group = None if is_dp else self._group

    def _start_one(self, rank: int, store: str, device: str) -> Follower:
        parts = self._config.parts
        cores = core_plan.of_rank(self._config.cores, rank, parts.parallel.num_ranks)
        ours, theirs = socket.socketpair()
        with theirs:
            argv = rank_argv(self._node_id, rank, theirs.fileno(), cores, parts.log.log_format)
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment_with(visible_to_rank(rank, parts.parallel.tp)) if self._on_gpus else None,
            )
        follower = Follower(rank, process, ours)
        ours.settimeout(LOAD_S)
        tell(
            ours,
            Start(
                rank=rank,
                size=parts.parallel.num_ranks,
                is_dp=parts.parallel.dp > 1,
                device=device,
                store=store,
                model=parts.model.model,
                dtype=parts.model.dtype,
                kv_dtype=parts.model.kv_dtype,
                weight_dtype=parts.model.weight_dtype,
                library=parts.model.model_library,
                max_context=parts.model.max_context,
                packed_bytes=parts.memory.packed_bytes,
                adapters=parts.model.adapters,
                load_s=LOAD_S,
                silence_s=parts.node.silence_s,
            ),
        )
        return follower

    def share(self, pool: KVPool) -> None:
        """Share the pages with the ranks, which have loaded the model.

        From then on, a rank counts as lost after a silence of `silence_s`, or as long as the group waits.
        """
        self.make_pages(pool)
        if self._group is None:
            return
        patience_s = self._group.be_patient(self._config.parts.node.silence_s)
        for follower in self._followers:
            follower.orders.settimeout(patience_s)
        if isinstance(self.ranks, DeviceRanks):
            pool.others = self.ranks
        elif self.ranks is not None:
            pool.seal()

    def make_pages(self, pool: KVPool) -> None:
        """Let the ranks map the pages of `pool`. On GPUs let them make as many, in the place of earlier ones."""
        for follower in self._followers:
            tell(follower.orders, Pages(pool.num_pages, pool.page_size, pool.page_bytes))
            if not self._on_gpus:
                socket.send_fds(follower.orders, [b"."], [pool.fd])
        for follower in self._followers:
            follower.wait_done()

    def measure_uses(self) -> list[RankUse]:
        """Return what the forwards so far took of the other ranks' GPUs. Raises RankLost."""
        for follower in self._followers:
            tell(follower.orders, Measure())
        return [follower.wait_use() for follower in self._followers]

    def check_ranks(self) -> None:
        """Raise RankLost if a rank has ended, ConfigError if a ConfigError ended one."""
        if (error := self._lost()) is not None:
            raise error

    def _lost(self) -> BatonError | None:
        """A rank that lacks another one ends, too: the other one's reason counts."""
        statuses = [(one.rank, one.process.poll()) for one in self._followers]
        ended = [(rank, status) for rank, status in statuses if status is not None]
        for rank, status in ended:
            if status == EXIT_CONFIG:
                return ConfigError(f"rank {rank} can't work as configured: its last log line says why")
        return RankLost("rank {} ended with status {}".format(*ended[0])) if ended else None

    def wait_for_end(self) -> None:
        """Wait for the reason why a rank is lost, GIVE_UP_S at most: its connections close long before its process
        has ended."""
        until = time.monotonic() + GIVE_UP_S
        while time.monotonic() < until:
            statuses = [follower.process.poll() for follower in self._followers]
            if EXIT_CONFIG in statuses or None not in statuses:
                return
            time.sleep(LAST_LOOK_S)

    def _watch(self, give_up: Callable[[BatonError], None]) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                self.check_ranks()
            except (RankLost, ConfigError) as error:
                if not self._closed.wait(GIVE_UP_S):
                    shutil.rmtree(self._folder, ignore_errors=True)
                    give_up(self._lost() or error)
                return

    def close(self) -> None:
        """End the ranks, by force if needed. Idempotent."""
        if self._group is not None:
            self._group.abort()
        for follower in self._followers:
            follower.orders.close()
        self._closed.set()  # the ranks now end because they were told to
        until = time.monotonic() + FAREWELL_S
        for follower in self._followers:
            end(follower.process, until)
        self._followers.clear()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def end(process: subprocess.Popen[bytes], until: float) -> None:
    """`until`: time.monotonic() at which it is killed."""
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def rank_argv(node_id: str, rank: int, descriptor: int, cores: CorePlan, log_format: str) -> Sequence[str]:
    """Return a rank's command line, with the arguments needed before torch loads.

    The message Start has the other arguments.
    """
    return launcher.command(
        "shared.ranks.process",
        *(f"--rank={rank}", f"--of={node_id}", f"--parent-pid={os.getpid()}", f"--orders={descriptor}"),
        *(f"--threads={core_plan.num_threads(cores)}", f"--cpus={','.join(map(str, cores.cpus))}"),
        *(f"--wait-policy={cores.wait_policy}", f"--log-format={log_format}"),
    )
