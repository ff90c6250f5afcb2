"""Draft heads on a tiny Llama: random weights, so drafts are nearly all wrong, and no stream may show them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shared.config.settings.settings import SpecConfig
from shared.core.sampling_params import SamplingParams
from shared.device.streams import make_streams
from shared.kernel.team.team import Team
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.settings import SchedSettings
from shared.speculation.drafters import make_drafter
from tests.support.cores.core_pair import CorePair, run_pair
from tests.support.cores.core_rig import Job, assert_whole, run_local
from tests.support.models.draft_head import head_config, head_tensors, save_head, save_target

KINDS = {"none": ("none", 0), "ngram": ("ngram", 0), "eagle": ("eagle", 0), "copies": ("eagle", 1)}
JOBS = [
    Job(0, tuple(range(3, 60)), SamplingParams(24, temperature=0.0), 1),
    Job(1, (5, 6, 7, 5, 6, 7, 5, 6), SamplingParams(30, temperature=0.8, repetition_penalty=1.2), 2),
    Job(2, tuple(range(3, 40)), SamplingParams(17, temperature=1.0, top_p=0.9, logit_bias=((7, 2.0),)), 3),
    Job(3, (44,), SamplingParams(20, temperature=0.7, presence_penalty=0.5, min_tokens=4), 4),
]
AGAIN = [replace(job, rid=10 + job.rid) for job in JOBS]  # begins with cached pages


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    save_target(root / "target")
    save_head(root / "head", head_tensors(), head_config())
    return root / "target", root / "head"


def make_core(kind: str, folders: tuple[Path, Path]) -> NodeCore:
    target, head = map(str, folders)
    model = load_model(target, LoadOptions("float32"))
    spec, copies = KINDS[kind]
    drafter = make_drafter(SpecConfig(spec=spec, spec_head=head, spec_copies=copies), target, model, Team())
    width = 1 if kind == "none" else 4
    settings = SchedSettings(page_size=8, max_context=200, chunk_size=16, mixed_chunk_size=5, width=width)
    return assemble_core(model, make_streams("inline"), settings, CoreSizes(80, 4), drafter=drafter)


def test_streams_are_those_of_plain_decoding(folders: tuple[Path, Path]) -> None:
    streams = {}
    for kind in KINDS:
        core = make_core(kind, folders)
        streams[kind] = [run_local(core, jobs).streams for jobs in (JOBS, AGAIN)]
        assert_whole(core)
        core.close()
    assert all(found == streams["none"] for found in streams.values()), streams
    assert all(streams["none"][0].values())


Drafted = dict[tuple[str, int], list[int]]


def watch_drafts(core: NodeCore) -> Drafted:
    """What was drafted, by request and committed length. Behind a request's end nothing counts."""
    drafter, drafted = core.engine.worker.drafter, {}
    assert drafter is not None
    propose = drafter.propose
    ends = {f"r{one.rid}": len(one.prompt) + one.sampling.max_tokens - 1 for one in JOBS}

    def watched(fb, *rest):  # noqa: ANN001, ANN002, ANN202
        drafts, first = propose(fb, *rest), fb.plan.num_prefill
        committed = fb.committed[first:].tolist()
        for row_id, length, ids in zip(fb.plan.row_ids[first:], committed, drafts.ids.tolist(), strict=True):
            if length < ends[row_id.key.rid]:
                drafted[row_id.key.rid, length] = ids
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]
    return drafted


def test_a_decode_node_drafts_what_one_node_alone_would(folders: tuple[Path, Path]) -> None:
    """Draft KV of the prompt and the relayed state cross the hand-off: drafts are the same, right or wrong."""
    alone = make_core("eagle", folders)
    wanted = watch_drafts(alone)
    streams = run_local(alone, JOBS).streams
    pair = CorePair(make_core("eagle", folders), make_core("eagle", folders))
    found = watch_drafts(pair.decode)
    assert run_pair(pair, JOBS).streams == streams
    assert found == wanted and len(found) > 40
    alone.close()
    pair.close()
