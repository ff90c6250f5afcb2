"""A node with a process for each of two virtual GPUs, from settings as a person types them: its plan, its streams, and
its end."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shared.config.machine.gpus import visible_to_rank
from shared.config.processes import NodeProcessConfig
from shared.core import launcher
from shared.core.errors import BatonError, RankLost
from shared.device.cpu import do_nothing
from shared.device.group import file_store, join_ranks
from shared.node.assembly import build_core, build_memory
from shared.node.assembly.gpu_memory import GpuUse, tightest
from shared.node.machine.cores import NodeCores
from shared.node.records.core import NodeCore
from shared.observe.log import Logger
from shared.ranks import leader
from shared.ranks.leader import RankProcesses
from tests.support.cores.core_rig import assert_whole, run_local
from tests.support.gpus.cuda_node import on_virtual_gpu, parts_of
from tests.support.gpus.virtual_rank import DECODE, ENDS_AT, LOAD, PROMPT
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.library_families import NUM_TOKENS, PROMPTS, generate, greedy_jobs, save
from tests.support.virtual_gpu.device import make_device


class TwoRanks:
    """A node whose model is in `folder`. `first`: of its other rank's arguments."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *first: str) -> None:
        torch.set_num_threads(1)
        self.started: list[str] = []
        command, self._gpu = launcher.command, make_device()

        def with_virtual_gpu(module: str, *args: str) -> list[str]:
            self.started.append(module)
            return command("tests.support.gpus.virtual_rank", *first, *args)

        patch.setattr(launcher, "command", with_virtual_gpu)
        on_virtual_gpu(self._gpu, patch)
        sizes = {"chunk_size": 32, "mixed_chunk_size": 32}
        parts = parts_of(**sizes, model_library="transformers", silence_s=HANG_GUARD_S)
        parts = replace(parts, model=replace(parts.model, model=str(folder)), parallel=replace(parts.parallel, tp=2))
        self._config = NodeProcessConfig(parts)
        self.device = str(self._gpu.device)

    def others(self, give_up: Callable[[BatonError], None] | None = None) -> RankProcesses:
        return RankProcesses(self._config, "n", give_up)

    def core(self, others: RankProcesses) -> NodeCore:
        cores = NodeCores(self._config.cores, self._config.parts.parallel, "n")
        return build_core.build_core(self._config, Logger("n", io.StringIO()), do_nothing, others, cores)


def test_a_node_of_two_processes_serves_and_ends_with_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are planned by the rank with the least room."""
    network = save("llama", tmp_path, vocab_size=212)
    said = [generate(network, prompt, NUM_TOKENS) for prompt in PROMPTS]
    uses: list[GpuUse] = []
    monkeypatch.setattr(
        build_memory, "tightest", lambda found, fraction: uses.extend(found) or tightest(found, fraction)
    )
    node = TwoRanks(tmp_path, monkeypatch)
    others = node.others()
    try:
        core = node.core(others)
        assert node.started == ["shared.ranks.process"] and core.graphs is None and core.pool.num_parts == 2
        assert len(uses) == 2 and uses[0].weights == uses[1].weights > 0 and min(one.largest_step for one in uses) > 0
        outcome = run_local(core, greedy_jobs())
        assert_whole(core)
        for rid, right in enumerate(said):
            right.tie(outcome.streams[f"r{rid}"])
        others.check_ranks()
        (follower,) = others._followers
        os.kill(follower.process.pid, signal.SIGKILL)
        follower.process.wait()
        with pytest.raises(RankLost, match="rank 1 ended with status -9"):
            others.check_ranks()
        with pytest.raises(RankLost):
            run_local(core, greedy_jobs())
        core.close()
    finally:
        others.close()


@pytest.mark.parametrize("phase", [LOAD, PROMPT, DECODE])
def test_a_node_gives_up_a_rank_that_it_waits_for(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in the group, which does not notice; a node's process ends now, and here the wait."""
    save("llama", tmp_path / "model", vocab_size=212)
    holder, store, told = tmp_path / "holder", tmp_path / "store", []
    monkeypatch.setattr(leader, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(leader, "tempfile", SimpleNamespace(mkdtemp=lambda prefix: str(tmp_path)))
    monkeypatch.setattr(leader, "shutil", SimpleNamespace(rmtree=lambda folder, ignore_errors: None))

    def give_up(error: BatonError) -> None:
        told.append(str(error))
        if phase == LOAD:
            joined.append(join_ranks(file_store(str(store), 2), 1, 2, HANG_GUARD_S, torch.device("cpu")))
        os.kill(int(holder.read_text()), signal.SIGKILL)

    joined: list[object] = []
    node = TwoRanks(tmp_path / "model", monkeypatch, f"{ENDS_AT}{phase},{holder}")
    others = node.others(give_up)
    try:
        if phase == LOAD:
            others.start(node.device)
        else:
            core = node.core(others)
            with pytest.raises(RankLost):
                run_local(core, greedy_jobs())
            core.close()
        assert told == ["rank 1 ended with status -9"]
    finally:
        others.close()


def test_the_tightest_gpu_bounds_the_pages() -> None:
    roomy, tight = GpuUse(1000, 900, 100, 50), GpuUse(1000, 900, 100, 300)
    assert tightest([roomy, tight], 0.9) is tightest([tight, roomy], 0.9) is tight
    other = GpuUse(1000, 200, 100, 50)  # other programs are there
    assert tightest([roomy, other, tight], 0.9) is other


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, ["0,1,2", "1,0,2", "2,0,1"]), ("5, GPU-ab,7,9", ["5,GPU-ab,7,9", "GPU-ab,5,7,9", "7,5,GPU-ab,9"])],
)
def test_each_rank_sees_its_own_gpu_first(
    visible: str | None, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [visible_to_rank(rank, 3) for rank in range(3)] == seen
