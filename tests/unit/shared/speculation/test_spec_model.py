"""Draft heads on a tiny Llama: random weights, so drafts are nearly all wrong, and no stream may show them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.config.settings.settings import SpecConfig
from shared.core.keys import RequestKey
from shared.core.request import NodeAsk, Request
from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.engine.drafter import Drafter
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.team.team import Team
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.llama.eagle_head import EagleHead, SeparateHead
from shared.model.loading.load import load_eagle_head, load_model
from shared.model.math.interface import Model
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.events import Emitted
from shared.sched.steps.settings import SchedSettings
from shared.speculation.drafters import make_drafter
from shared.speculation.multi_layer_eagle import MultiLayerEagleWorkerV2
from tests.support.cores.core_pair import CorePair, run_pair
from tests.support.cores.core_rig import Job, run_local
from tests.support.models.draft_head import head_config, head_tensors, save_head, save_target

KINDS = ("none", "ngram", "eagle", "mtp", "copies")
JOBS = [
    (list(range(3, 60)), SamplingParams(max_tokens=24, temperature=0.0), 1),
    ([5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(max_tokens=30, temperature=0.8, repetition_penalty=1.2), 2),
    (list(range(3, 40)), SamplingParams(max_tokens=17, temperature=1.0, top_p=0.9, logit_bias=((7, 2.0),)), 3),
    ([44], SamplingParams(max_tokens=20, temperature=0.7, presence_penalty=0.5, min_tokens=4), 4),
]
JOBS_BY_ID = list(enumerate(JOBS))


@dataclass(frozen=True)
class Stacked:
    """A head as one layer of several: its KV has a plane of its own."""

    head: EagleHead
    layer: int

    def __getattr__(self, name: str) -> object:
        return getattr(self.head, name)

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return tuple(replace(plane, name=f"{plane.name}{self.layer}") for plane in self.head.kv_planes(page_size))

    @property
    def network(self) -> SeparateHead:
        assert isinstance(self.head.network, SeparateHead)
        return self.head.network

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        return self.network._weights.fc(aux).float()

    def states(self, next_ids: torch.Tensor, features: torch.Tensor, view: AttentionInputs, kv: KVPool) -> torch.Tensor:
        return self.head.forward(next_ids, features, view, Renamed(kv, self.layer)).hidden  # type: ignore[arg-type]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.network._weights
        return weights.head(self.network._blocks.add_norm(hidden, None, weights.norm))


@dataclass(frozen=True)
class Renamed:
    kv: KVPool
    layer: int

    def plane(self, name: str) -> torch.Tensor:
        return self.kv.plane(f"{name}{self.layer}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    root = tmp_path_factory.mktemp("tiny")
    save_target(root / "target")
    save_head(root / "head", head_tensors(), head_config())
    yield root / "target", root / "head"


def drafter_of(kind: str, folders: tuple[Path, Path], model: Model) -> Drafter | None:
    target, head = map(str, folders)
    if kind != "mtp":
        spec, copies = ("eagle", 1) if kind == "copies" else (kind, 0)
        return make_drafter(SpecConfig(spec=spec, spec_head=head, spec_copies=copies), target, model, Team())
    layers = [Stacked(load_eagle_head(head, target, model, kernels="torch"), layer) for layer in (0, 1)]  # type: ignore[arg-type]
    model.capture_aux(layers[0].head.aux_layers)  # type: ignore[attr-defined]
    return MultiLayerEagleWorkerV2(layers, model.spec.vocab_size)  # type: ignore[arg-type]


def make_core(kind: str, folders: tuple[Path, Path], chunk_size: int = 16) -> NodeCore:
    model = load_model(str(folders[0]), LoadOptions("float32"))
    drafter = drafter_of(kind, folders, model)
    width = {"none": 1, "mtp": 3}.get(kind, 4)
    settings = SchedSettings(page_size=8, max_context=200, chunk_size=chunk_size, mixed_chunk_size=5, width=width)
    return assemble_core(model, make_streams("inline"), settings, CoreSizes(80, 4), drafter=drafter)


def run(core: NodeCore) -> dict[str, list[int]]:
    """Twice the same jobs: the second round begins with cached pages."""
    streams: dict[str, list[int]] = {}
    for again in range(2):
        for i, (prompt, sampling, seed) in enumerate(JOBS):
            key = RequestKey("test", 1, f"{again}.{i}", 0, 0)
            core.scheduler.intake.submit(
                Request(key, NodeAsk(np.asarray(prompt, np.int64), sampling, seed), arrival=10 * again + i)
            )
        while core.queues.requests or not core.loop.idle:
            core.loop.step(block=True)
            for event in core.queues.take_events():
                if isinstance(event, Emitted):
                    streams.setdefault(event.key.rid, []).extend(event.ids)
    core.kv.check_integrity(idle=True)
    core.close()
    return streams


def test_streams_are_those_of_plain_decoding(folders: tuple[Path, Path]) -> None:
    streams = {kind: run(make_core(kind, folders)) for kind in KINDS}
    assert len(streams["none"]) == 2 * len(JOBS) and all(streams["none"].values())
    for kind in KINDS[1:]:
        assert streams[kind] == streams["none"], kind


Drafted = dict[tuple[str, int], list[int]]


def watch_drafts(core: NodeCore, known: list[Job]) -> Drafted:
    """What was drafted, by request and committed length. Behind a request's end nothing counts."""
    drafter, drafted = core.engine.worker.drafter, {}
    assert drafter is not None
    propose = drafter.propose
    ends = {f"r{one.rid}": len(one.prompt) + one.sampling.max_tokens - 1 for one in known}

    def watched(fb, *rest):  # noqa: ANN001, ANN002, ANN202
        drafts, first = propose(fb, *rest), fb.plan.num_prefill
        committed = fb.committed[first:].tolist()
        for row_id, length, ids in zip(fb.plan.row_ids[first:], committed, drafts.ids.tolist(), strict=True):
            if length < ends[row_id.key.rid]:
                drafted[row_id.key.rid, length] = ids
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]
    return drafted


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_a_decode_node_drafts_what_one_node_alone_would(kind: str, folders: tuple[Path, Path]) -> None:
    """Draft KV of the prompt and the relayed state cross the hand-off: drafts are the same, right or wrong."""
    jobs = [
        Job(i, tuple(prompt), replace(sampling, stop_token_ids=()), seed) for i, (prompt, sampling, seed) in JOBS_BY_ID
    ]
    alone = make_core(kind, folders)
    wanted = watch_drafts(alone, jobs)
    streams = run_local(alone, jobs).streams
    pair = CorePair(make_core(kind, folders), make_core(kind, folders))
    found = watch_drafts(pair.decode, jobs)
    assert run_pair(pair, jobs).streams == streams
    assert found == wanted and len(found) > 40
    alone.close()
    pair.close()
