"""Memory past a sequence's end: for every depth of the loop, from one place, and enough for what flags allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from shared.config.processes import NodeParts
from shared.config.settings.settings import MemoryConfig, SpecConfig
from shared.core.overshoot import loop_depth, overshoot
from shared.kernel.code.step_layout import Layout
from shared.kv.layout import page_bytes
from shared.kv.pool import KVPool
from shared.model.formats.opened import MOST_STAGES, MOST_WIDTH, LoadOptions
from shared.model.hashlm.model import HashLM
from shared.model.loading.pipeline import load_pipeline
from shared.model.math.interface import ModelInputs
from shared.node.assembly.memory_plan import MemoryPlan, plan_memory
from tests.support.cores.core_rig import CoreKnobs, make_core
from tests.support.cores.scripted_core import job
from tests.support.models.tiny_families import WHOLE, llama
from tests.support.models.tiny_models import save_random


def plans(parts: NodeParts) -> list[MemoryPlan]:
    """Of nodes whose loops are 0 to 4 deep, on a machine with a free GiB."""
    num_bytes = page_bytes(HashLM(max_context=512).kv_planes(parts.memory.page_size))
    return [plan_memory(parts, 512, num_bytes, depth, "cpu", 1 << 30) for depth in range(5)]


def test_memory_grows_by_a_window_per_open_step_beyond_two() -> None:
    """(pages with the sink, context) of a node, as it says at its start."""
    parts = NodeParts(memory=MemoryConfig(page_size=16, max_running=2), spec=SpecConfig("ngram", spec_width=8))
    found = [(made.num_pages, made.max_context) for made in plans(parts)]
    assert found == [(69, 512)] * 4 + [(71, 512)], "512 + 24, 32 and 40 tokens in pages of 16"
    short = replace(parts, memory=replace(parts.memory, kv_bytes=16 * 20 * 16))
    assert [made.max_context for made in plans(short)] == [320 - 24] * 3 + [320 - 32, 320 - 40]


def test_a_node_refuses_what_is_longer_than_its_context() -> None:
    """It would write past its row's history, whatever its pages hold."""
    core = make_core(CoreKnobs(page_size=64, width=4, spec="ngram"))
    assert core.queues.budget.can_ever_hold(job(1, 500, 12).request())
    assert not core.queues.budget.can_ever_hold(job(2, 500, 13).request())


def test_position_tables_reach_as_far_as_any_step(tmp_path: Path) -> None:
    save_random(llama(**WHOLE)(), tmp_path)
    model, _ = load_pipeline(str(tmp_path), LoadOptions("float32", kernels="torch"), 4)
    last = model.spec.max_context + overshoot(MOST_WIDTH, loop_depth(True, MOST_STAGES)) - 1
    num_pages = last // 16 + 1
    inputs = ModelInputs(
        input_ids=torch.tensor([1]),
        positions=torch.tensor([last]),
        layout=Layout(
            cu_q_lens=torch.tensor([0, 1], dtype=torch.int32),
            page_tables=(torch.arange(1, num_pages + 1, dtype=torch.int32)[None],),
            max_q_len=1,
            max_seq_len=last + 1,
        ),
        logits_idx=torch.tensor([0]),
    )
    pool = KVPool(model.kv_planes(16), num_pages + 1, 16)
    assert model.forward(inputs, pool).logits.isfinite().all()
    pool.close()
