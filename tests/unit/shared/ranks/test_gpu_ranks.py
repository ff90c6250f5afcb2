"""A model of the library on several virtual GPUs, a rank and pages for each: its streams are its `generate`'s.

Ranks are threads; test_gpu_rank_processes.py has processes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from shared.core.errors import ConfigError, RankLost
from shared.device.gpu import MIB, MemoryInfo
from shared.device.group import NcclRanks, RankGroup, join_ranks
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.model.formats.opened import LoadOptions
from shared.model.library.model import LibraryModel
from shared.model.loading.load import why_not_on_gpus
from shared.model.loading.shard import load_shard
from shared.model.math.interface import ModelInputs
from shared.node.assembly.gpu_memory import LARGEST_STEP, explained
from shared.ranks.on_device import DeviceRanks, inputs_of, order_of
from shared.ranks.orders import (
    LENGTH_BYTES,
    DeviceOrder,
    Forward,
    Measure,
    PageBytes,
    Pages,
    RankUse,
    ReadPages,
    WritePage,
    hear,
    hear_order,
    tell,
)
from tests.support.cores.core_rig import assert_whole, run_local
from tests.support.cores.tp_rig import load_in_turn
from tests.support.gpus.cuda_core import folder_of
from tests.support.gpus.gpu_ranks import PAGE, GpuTeam, core_of, gpu_team
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.library_families import NUM_TOKENS, PROMPTS, generate, greedy_jobs, load, save
from tests.support.virtual_gpu.device import make_devices

NUM_PAGES = 40


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    load_in_turn(monkeypatch)


def assert_served(family: str, folder: Path, mode: str = "eager", drafted: bool = False) -> GpuTeam:
    """Return the ranks, which have ended. All rows are retracted now and then."""
    network = save(family, folder, vocab_size=212)
    said = [generate(network, prompt, NUM_TOKENS) for prompt in PROMPTS]
    with gpu_team(folder, make_devices(2, mode)) as team:
        core = core_of(team, NUM_PAGES, drafted)
        try:
            outcome = run_local(core, greedy_jobs(), retract_every=7, rng=random.Random(3))
            assert_whole(core)
        finally:
            core.close()
    assert all(end.error is None for end in outcome.ends.values())
    for rid, right in enumerate(said):
        right.tie(outcome.streams[f"r{rid}"])
    return team


def num_bytes(team: GpuTeam, rank: int) -> int:
    model = team.model if rank == 0 else team.models[rank]
    assert isinstance(model, LibraryModel)
    return sum(parameter.nbytes for parameter in model.network.parameters())


def test_two_gpus_say_what_the_library_says(tmp_path: Path) -> None:
    """Each has half of the heads' weights and of their pages."""
    team = assert_served("llama", tmp_path)
    (own,) = team.model.kv_planes(PAGE)
    (whole,) = load(tmp_path).kv_planes(PAGE)
    assert 2 * own.num_bytes == whole.num_bytes
    assert team.models[1].kv_planes(PAGE) == (own,)
    assert num_bytes(team, 0) == num_bytes(team, 1) < 0.6 * load(tmp_path).spec.stored.memory_bytes  # type: ignore[union-attr]
    assert {str(p.device) for p in team.models[1].network.parameters()} == {"vgpu:1"}  # type: ignore[attr-defined]


def test_late_devices_say_what_the_library_says(tmp_path: Path) -> None:
    assert_served("qwen3_moe", tmp_path, mode="deferring", drafted=True)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_heads_that_the_plan_keeps_whole_are_on_each_gpu(family: str, tmp_path: Path) -> None:
    team = assert_served(family, tmp_path)
    assert team.model.kv_planes(PAGE) == team.models[1].kv_planes(PAGE) == load(tmp_path).kv_planes(PAGE)


# Orders


def step_of(num_rows: int, device: str) -> ModelInputs:
    """Return decode rows with drafts, which have more tensors than others."""
    bounds = np.arange(num_rows + 1, dtype=np.int32) * 2
    count = 2 * num_rows
    layout = Layout(
        torch.from_numpy(bounds).to(device),
        (torch.arange(num_rows * 3, dtype=torch.int32, device=device).view(num_rows, 3),),
        2,
        40,
        host=HostLengths(bounds, np.full(num_rows, 9), num_rows),
    )
    numbers = torch.arange(count, device=device)
    return ModelInputs(numbers + 3, numbers, layout, numbers, slots=numbers, visible=numbers - 1)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_an_order_keeps_what_the_device_and_the_host_know(num_rows: int) -> None:
    inputs = step_of(num_rows, "cpu")
    order, numbers = order_of(inputs)
    found = inputs_of(order, numbers.clone())
    assert order.num_numbers == len(numbers) == 5 * 2 * num_rows + (num_rows + 1) + 3 * num_rows
    for name, tensor in inputs.per_token().items():
        assert torch.equal(found.per_token()[name], tensor) and found.per_token()[name].dtype == tensor.dtype
    for name, tensor in inputs.layout.arrays().items():
        assert torch.equal(found.layout.arrays()[name], tensor) and found.layout.arrays()[name].dtype == tensor.dtype
    assert torch.equal(found.logits_idx, inputs.logits_idx)
    host, right = found.layout.host, inputs.layout.host
    assert host is not None and right is not None and right.seq_lens is not None
    assert np.array_equal(host.cu_q_lens, right.cu_q_lens) and np.array_equal(host.seq_lens, right.seq_lens)
    assert host.num_running == num_rows


class Ear:
    """A follower's socket. The first order is on its way until `later` has been sent, or is made to wait."""

    def __init__(self, later: Callable[[], None]) -> None:
        self.heard: list[DeviceOrder] = []
        self._thread = threading.Thread(target=later)

    def sendall(self, data: bytes) -> None:
        if self._thread.ident is None:
            self._thread.start()
            self._thread.join(0.3)
        self.heard.append(msgspec.msgpack.decode(data[LENGTH_BYTES:], type=DeviceOrder))

    def wait(self) -> None:
        self._thread.join(HANG_GUARD_S)


def test_orders_of_steps_and_pages_are_one_sequence() -> None:
    """Two threads give orders, which may not overtake each other on the way to some of the ranks."""
    first = Ear(lambda: ranks.write(3, slice(0, 2), np.ones((2, 2), np.uint8)))
    second = Ear(lambda: None)
    group: Any = SimpleNamespace(broadcast=lambda numbers: None)
    model: Any = SimpleNamespace(forward=lambda inputs, kv: None)
    ears: Any = [first, second]
    ranks = DeviceRanks(group, ears)
    ranks.forward(model, step_of(1, "cpu"), model)
    first.wait()
    for ear in (first, second):
        assert [type(order) for order in ear.heard] == [Forward, WritePage]


def test_a_late_answer_is_not_the_next_ones() -> None:
    """A transfer fails alone, and the node would go on: so the ranks end, and with them the node."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # an answer that has not come is late
    group: Any = SimpleNamespace(broadcast=lambda numbers: None)
    model: Any = SimpleNamespace(forward=lambda inputs, kv: None)
    ranks = DeviceRanks(group, [ours])
    with ours, theirs:
        with pytest.raises(RankLost):
            ranks.read((1,), slice(0, 4))
        assert isinstance(hear_order(theirs), ReadPages)
        with contextlib.suppress(RankLost):
            tell(theirs, PageBytes(b"late"))
        with pytest.raises(RankLost):
            ranks.read((2,), slice(0, 4))
        with pytest.raises(RankLost):
            ranks.forward(model, step_of(1, "cpu"), model)
        theirs.setblocking(False)
        assert theirs.recv(1) == b"", "the follower ends"


def test_an_order_in_pieces_is_the_last_one() -> None:
    """The next one's bytes would be those of the page."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    group: Any = SimpleNamespace()
    with ours, theirs:
        with pytest.raises(RankLost):
            DeviceRanks(group, [ours]).write(1, slice(0, 1 << 24), np.zeros((1, 1 << 24), np.uint8))
        theirs.setblocking(False)
        while theirs.recv(1 << 20):  # up to the end, or an error if there may be more
            pass


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (torch.OutOfMemoryError("all is taken"), ConfigError, "too little for the largest step: lower --chunk.*all is"),
        (RuntimeError("a fault"), RankLost, "RuntimeError: a fault"),
    ],
)
def test_a_step_too_large_for_ranks_names_the_settings(error: Exception, kind: type[Exception], told: str) -> None:
    (gpu,) = make_devices(1)

    def fail(*_: object) -> None:
        raise error

    group: Any = SimpleNamespace(broadcast=lambda numbers: None)
    model: Any = SimpleNamespace(forward=fail)
    with pytest.raises(kind, match=told), explained(gpu, str(gpu.device), LARGEST_STEP):
        DeviceRanks(group, []).forward(model, step_of(1, "cpu"), model)


@pytest.mark.rule("H28")
def test_a_step_without_rows_keeps_ranks_in_step(tmp_path: Path) -> None:
    """No rank has rows then, and its index is empty. Experts' sums of the next step still meet."""
    save("qwen3_moe", tmp_path, vocab_size=212)
    with gpu_team(tmp_path) as team:
        core, device = core_of(team), str(team.gpus[0].device)
        with torch.inference_mode():
            right = team.ranks.forward(team.model, step_of(2, device), core.pool).logits.cpu()
            assert team.ranks.forward(team.model, step_of(0, device), core.pool).logits.shape == (0, 212)
            assert torch.equal(team.ranks.forward(team.model, step_of(2, device), core.pool).logits.cpu(), right)
        core.close()


def test_a_rank_measures_its_own_gpu(tmp_path: Path) -> None:
    save("llama", tmp_path, vocab_size=212)
    with gpu_team(tmp_path) as team:
        core = core_of(team)
        run_local(core, greedy_jobs())
        core.close()
        tell(team.sockets[0], Measure())
        use = hear(team.sockets[0], RankUse)
        assert use is not None and use.weights >= num_bytes(team, 1)
        assert use.total == team.gpus[1].memory_info(team.gpus[1].device).total_bytes > use.free
        assert use.largest_step >= NUM_PAGES * core.pool.page_bytes


def test_a_rank_whose_pages_are_others_is_lost(tmp_path: Path) -> None:
    save("llama", tmp_path, vocab_size=212)
    team = GpuTeam(tmp_path, make_devices(2))
    tell(team.sockets[0], Pages(4, PAGE, 12))
    assert hear(team.sockets[0], Pages) is None
    team.close()
    (error,) = team.errors
    assert isinstance(error, RankLost) and "rank 0's 12" in str(error)


def test_a_lost_rank_ends_the_others_step(tmp_path: Path) -> None:
    save("llama", tmp_path, vocab_size=212)
    team = GpuTeam(tmp_path, make_devices(2))
    core = core_of(team)
    team.sockets[0].close()  # the follower ends, and with it its end of the group
    team.threads[0].join(HANG_GUARD_S)
    with pytest.raises(RankLost), torch.inference_mode():
        team.ranks.forward(team.model, step_of(1, str(team.gpus[0].device)), core.pool)
    core.close()
    team.close()


# What is refused


def test_a_part_that_does_not_fit_on_a_gpu_is_refused(tmp_path: Path) -> None:
    """The whole would not fit either way."""
    save("llama", tmp_path, vocab_size=212)
    group: Any = SimpleNamespace(rank=0, size=2)
    whole = load(tmp_path).spec.stored.memory_bytes  # type: ignore[union-attr]
    options = LoadOptions("float32", library="transformers", memory=MemoryInfo(whole // 2, MIB))
    with pytest.raises(ConfigError, match="the weights need"):
        load_shard(str(tmp_path), options, group, "vgpu:0")


def test_families_of_our_own_are_not_divided_among_gpus() -> None:
    name = str(folder_of("draft target"))
    assert "try --model-library transformers" in why_not_on_gpus(name)
    assert why_not_on_gpus(name, LoadOptions(library="transformers")) == ""
    group: Any = SimpleNamespace(rank=0, size=2)
    with pytest.raises(ConfigError, match="--tp 2 --device vgpu:0: only models that the library"):
        load_shard(name, LoadOptions("float32"), group, "vgpu:0")


# NCCL, with a stand-in


class StandIn:
    """torch's ProcessGroupNCCL, as far as Baton calls it, over gloo."""

    class Options:
        _timeout = timedelta()

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo._timeout = options._timeout
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, gloo)
        self.told: list[Any] = []
        for name in ("allreduce", "broadcast", "_allgather_base"):
            setattr(self, name, getattr(self._gloo, name))

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.told.append(device)

    def set_timeout(self, timeout: timedelta) -> None:
        self.told.append(timeout)

    def abort(self) -> None:
        self.told.append("abort")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NcclRanks]]:
    """Two ranks, as threads join them."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setitem(os.environ, "NCCL_SOCKET_IFNAME", "")
    del os.environ["NCCL_SOCKET_IFNAME"]
    store, found = dist.HashStore(), {}

    def join(rank: int) -> None:
        found[rank] = join_ranks(store, rank, 2, HANG_GUARD_S, torch.device("cuda"))

    run_together(join)
    yield [found[0], found[1]]  # type: ignore[list-item]


def run_together(do: Callable[[int], Any]) -> list[Any]:
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda rank=rank: results.update({rank: do(rank)})) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    return [results[rank] for rank in range(2)]


def test_nccl_computes_what_gloo_computes(nccl: list[NcclRanks]) -> None:
    assert all(isinstance(one, NcclRanks) for one in nccl)
    own = [torch.tensor([[1.5, 2.0], [3.0, -4.0]]).T, torch.tensor([[0.25, 8.0], [1.0, 2.0]])]
    for total in run_together(lambda rank: nccl[rank].sum(own[rank])):
        assert torch.equal(total, own[0] + own[1])
    for stacked in run_together(lambda rank: nccl[rank].stack(own[rank])):
        assert torch.equal(stacked, torch.stack(own))
    given = [torch.arange(4), torch.zeros(4, dtype=torch.int64)]
    run_together(lambda rank: nccl[rank].broadcast(given[rank]))
    assert torch.equal(given[1], torch.arange(4))
    assert own[0].tolist() == [[1.5, 3.0], [2.0, -4.0]], "what is added stays as it is"


def test_nccl_is_told_how_long_to_wait_and_when_to_end(nccl: list[NcclRanks]) -> None:
    assert nccl[0].be_patient(300.0) == 300
    assert nccl[0].be_patient(2.5) == 60  # a device may have a longer step ahead of a collective
    nccl[0].abort()
    told: Any = nccl[0]._group
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert told.told == [torch.device("cuda", 0), timedelta(seconds=300), timedelta(seconds=60), "abort"]


def test_ranks_elsewhere_join_by_gloo() -> None:
    store = dist.HashStore()
    first, second = (gpu.device for gpu in make_devices(2))
    groups = run_together(lambda rank: join_ranks(store, rank, 2, HANG_GUARD_S, (first, second)[rank]))
    assert all(type(group) is RankGroup for group in groups)
    given = [torch.arange(4, device=first), torch.zeros(4, dtype=torch.int64, device=second)]
    run_together(lambda rank: groups[rank].broadcast(given[rank]))
    assert given[1].cpu().tolist() == [0, 1, 2, 3]
