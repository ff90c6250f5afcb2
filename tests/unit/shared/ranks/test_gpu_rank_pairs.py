"""Hand-offs between nodes of two virtual GPUs each: every rank's part of a page arrives at the same rank's."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.core.errors import ConfigError, HandoffFailed, RankLost
from shared.node.assembly.build_memory import transports
from shared.node.assembly.fingerprint import difference
from shared.transfer.host_bytes import reader_of, writer_of
from shared.transfer.interface import WHOLE, Part, part_bytes, require_part_bytes
from shared.wire.messages import Installed
from tests.support.cores.core_rig import CoreKnobs
from tests.support.cores.tp_rig import load_in_turn
from tests.support.gpus.cuda_node import parts_of
from tests.support.gpus.gpu_ranks import PAGE, GpuTeam, core_of, gpu_team
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.library_families import NUM_TOKENS, PROMPTS, generate, greedy_jobs, load, save
from tests.support.virtual_gpu.device import make_devices
from tests.support.worlds.node_pair import Net, make_node

KNOBS = CoreKnobs(page_size=PAGE, max_running=4)


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    load_in_turn(monkeypatch)


@pytest.mark.parametrize("mode", ["eager", "deferring"])
def test_pages_of_two_gpus_go_to_two_gpus(mode: str, tmp_path: Path) -> None:
    """The decode node's pool is small, so requests are also retracted there."""
    network = save("llama", tmp_path, vocab_size=212)
    said = [generate(network, prompt, NUM_TOKENS) for prompt in PROMPTS]
    gpus = make_devices(4, mode)
    with contextlib.ExitStack() as stack:
        nodes = []
        for role, own, num_pages in (("prefill", gpus[:2], 40), ("decode", gpus[2:], 9)):
            team = stack.enter_context(gpu_team(tmp_path, own))
            core = core_of(team, num_pages)
            stack.callback(core.close)
            node = make_node(role, role[0], KNOBS, core=core, gpu=own[0])
            stack.callback(node.side.close)
            nodes.append(node)
        net = Net(nodes)
        keys = [net.generate(nodes[0], job, nodes[1]) for job in greedy_jobs()]
        net.run_until_ended(keys)
        net.settle(*nodes)
        assert len(net.messages(Installed)) == len(keys)
        counters = nodes[1].ctx.metrics.counters()
        assert counters["handoffs"] == len(keys) and counters["handoff_bytes"] % (2 * core.pool.page_bytes) == 0
    for key, right in zip(keys, said, strict=True):
        right.tie(net.router.streams[key])


@pytest.fixture
def team(tmp_path: Path) -> GpuTeam:
    save("llama", tmp_path, vocab_size=212)
    with gpu_team(tmp_path) as made:
        yield made  # type: ignore[misc]


def test_a_page_is_all_ranks_parts_ours_first(team: GpuTeam) -> None:
    core = core_of(team)
    pool, gpu = core.pool, team.gpus[0]
    assert pool.num_parts == 2 and part_bytes(WHOLE, pool) == 2 * pool.page_bytes
    draw = np.random.default_rng(1)
    whole = [draw.integers(0, 256, 2 * pool.page_bytes, dtype=np.uint8) for _ in range(3)]
    with torch.inference_mode():
        for page, data in zip((5, 2, 7), whole, strict=True):
            assert np.array_equal(writer_of(pool, gpu).write(page, WHOLE, data), data)
        assert torch.equal(pool.pages_bytes[2].cpu(), torch.from_numpy(whole[1][: pool.page_bytes]))
        found, block = reader_of(pool, gpu).read((5, 2, 7), slice(0, pool.page_bytes))
        assert block is not None and all(np.array_equal(one, data) for one, data in zip(found, whole, strict=True))
        first = Part(1, 2)
        where = first.bytes_in(pool.planes)
        (some,), _ = reader_of(pool, gpu).read((2,), where)
        assert len(some) == part_bytes(first, pool)
        assert np.array_equal(some, np.concatenate([half[where] for half in np.split(whole[1], 2)]))
        assert reader_of(pool, gpu).read((), where) == ([], None)
    with pytest.raises(HandoffFailed, match=f"ours have {2 * pool.page_bytes}"):
        require_part_bytes(pool.page_bytes, WHOLE, pool)
    require_part_bytes(2 * pool.page_bytes, WHOLE, pool)
    core.close()


def test_a_rank_that_sends_no_pages_is_lost(team: GpuTeam) -> None:
    core = core_of(team)
    team.sockets[0].close()
    team.threads[0].join(HANG_GUARD_S)
    with pytest.raises(RankLost):
        reader_of(core.pool, team.gpus[0]).read((1,), slice(0, 4))
    core.close()


def test_unequal_numbers_of_gpus_do_not_pair(team: GpuTeam, tmp_path: Path) -> None:
    """Even where pages of one GPU would look the same."""
    core = core_of(team)
    two = make_node("prefill", "p", KNOBS, core=core, gpu=team.gpus[0]).ctx.facts.fingerprint
    alone = replace_parts(two.page_layout)
    assert two.page_layout == f"{alone};2 parts"
    one = make_node("decode", "d", KNOBS, model=load(tmp_path)).ctx.facts.fingerprint
    assert one.page_layout != alone and "page_layout differs" in difference(two, one)
    core.close()


def replace_parts(layout: str) -> str:
    return layout.removesuffix(";2 parts")


def test_ranks_on_gpus_hand_over_by_zmq_alone() -> None:
    parts = replace(parts_of(), parallel=replace(parts_of().parallel, tp=2))
    assert transports(parts, "cuda") == ("zmq",)
    named = replace(parts, node=replace(parts.node, transport="cuda_ipc"))
    with pytest.raises(ConfigError, match="--transport cuda_ipc: ranks on GPUs hand pages over by zmq only"):
        transports(named, "cuda")
