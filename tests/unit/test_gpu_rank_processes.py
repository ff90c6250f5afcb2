"""A node with a process for each of two virtual GPUs, from settings as a person types them: its plan, its streams, and
its end."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.config.gpus import visible_to_rank
from shared.config.processes import NodeProcessConfig
from shared.core import launcher
from shared.core.errors import RankLost
from shared.device.cpu import do_nothing
from shared.node import build_core, build_memory
from shared.node.cores import NodeCores
from shared.node.gpu_memory import GpuUse, tightest
from shared.observe.log import Logger
from shared.ranks.leader import RankProcesses
from tests.support.core_rig import assert_whole, run_local
from tests.support.cuda_node import on_virtual_gpu, parts_of
from tests.support.library_families import NUM_TOKENS, PROMPTS, generate, greedy_jobs, save
from tests.support.patience import HANG_GUARD_S
from tests.support.virtual_gpu.device import make_device


def test_a_node_of_two_processes_serves_and_ends_with_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are planned by the rank with the least room."""
    torch.set_num_threads(1)
    network = save("llama", tmp_path, vocab_size=212)
    said = [generate(network, prompt, NUM_TOKENS) for prompt in PROMPTS]
    command, started = launcher.command, []

    def with_virtual_gpu(module: str, *args: str) -> list[str]:
        started.append(module)
        return command("tests.support.virtual_rank", *args)

    monkeypatch.setattr(launcher, "command", with_virtual_gpu)
    uses: list[GpuUse] = []
    monkeypatch.setattr(
        build_memory, "tightest", lambda found, fraction: uses.extend(found) or tightest(found, fraction)
    )
    gpu = make_device()
    on_virtual_gpu(gpu, monkeypatch)
    sizes = {"chunk_size": 32, "mixed_chunk_size": 32}
    parts = parts_of(**sizes, model_library="transformers", silence_s=HANG_GUARD_S)
    parts = replace(parts, model=replace(parts.model, model=str(tmp_path)), parallel=replace(parts.parallel, tp=2))
    config = NodeProcessConfig(parts)
    others = RankProcesses(config, "n")
    cores = NodeCores(config.cores, parts.parallel, "n")
    try:
        core = build_core.build_core(config, Logger("n", io.StringIO()), do_nothing, others, cores)
        assert started == ["shared.ranks.process"] and core.graphs is None and core.pool.num_parts == 2
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
