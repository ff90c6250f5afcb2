"""The equality matrix: whole requests through scheduler, engine, model and sampler on the device, beside the CPU's."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shared.core.errors import BatonError
from tests.gpu.failed_steps import no_failed_steps
from tests.gpu.place import Place
from tests.support.cores.core_rig import Outcome, assert_whole, run_local
from tests.support.gpus.cuda_core import KINDS, Kind, make_core
from tests.support.gpus.cuda_jobs import LENGTHS, jobs_for
from tests.support.models import tiny_families

RETRACT_EVERY = 9
NUM_TINY_JOBS = 2


@dataclass(frozen=True, slots=True)
class How:
    """The device's way of computing; the CPU's is always the reference."""

    kernels: str = "torch"
    graphs: bool = False


PLAIN = How()


def kinds(place: Place, *names: str) -> dict[str, object]:
    """Compare streams of one network, drafted and mixed in different ways."""
    return compare(place, {name: KINDS[name] for name in (names[:1] if place.tiny else names)})


def graphs(place: Place, *names: str) -> dict[str, object]:
    """The same with Triton's kernels, prompts and decode steps as graphs: what a GPU's node does by default."""
    how = How(
        "torch" if place.tiny else "triton", graphs=True
    )  # interpreted, they take minutes: tests/unit/shared/gpu_kernel/test_triton_graphs.py
    return compare(place, {name: KINDS[name] for name in (names[:1] if place.tiny else names)}, how)


def families(place: Place, *prefixes: str) -> dict[str, object]:
    """All of the tiny networks whose family is one of these, without drafts."""
    names = [name for name in tiny_families.FAMILIES if name.split(",")[0] in prefixes]
    assert names, prefixes
    return compare(place, {name: Kind(family=name) for name in (names[:1] if place.tiny else names)})


def library(place: Place, *families: str) -> dict[str, object]:
    """Models that the library transformers runs, as a GPU's node runs them by default: our kernels, or torch on our
    pages, and graphs. In bfloat16 random experts are nearly tied, so they run in float32, where they have no graphs."""
    how = How("torch" if place.tiny else "auto", graphs=True)
    return compare(place, {name: Kind(name, library=True) for name in (families[:1] if place.tiny else families)}, how)


def compare(place: Place, cells: dict[str, Kind], how: How = PLAIN) -> dict[str, object]:
    """Return the steps of each cell. Runs all cells, and then names those that differ together."""
    steps: dict[str, object] = {}
    wrong = []
    for name, kind in cells.items():
        try:
            steps[f"{name}, steps"] = equal_streams(place, kind, how)
        except (AssertionError, BatonError, RuntimeError) as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:500]}")
    assert not wrong, "\n".join(wrong)
    return steps


def equal_streams(place: Place, kind: Kind, how: How) -> int:
    expected, found = outcome(None, kind, place.tiny), outcome(place, kind, place.tiny, how)
    for rid, stream in expected.streams.items():
        assert found.streams[rid] == stream, f"{rid}: {found.streams[rid]} instead of {stream}"
    assert found.ends.keys() == expected.ends.keys()
    return found.num_steps


def outcome(place: Place | None, kind: Kind, tiny: bool, how: How = PLAIN) -> Outcome:
    """Retractions too. `place`: None is the CPU."""
    gpu = None if place is None else place.gpu
    core = make_core(kind, gpu, kernels=how.kernels, graphs=how.graphs)  # type: ignore[arg-type]
    try:
        given = jobs_for(kind, core.settings.adapters.digests, NUM_TINY_JOBS if tiny else len(LENGTHS))
        with no_failed_steps():
            found = run_local(core, given, retract_every=RETRACT_EVERY, rng=random.Random(1))
        assert_whole(core)
        if core.graphs is not None:
            eager, prompts = dict(core.graphs.eager), core.graphs.graphed_prompts
            if kind.library:
                lacking = {"waits"} if core.model.spec.has_grouped_experts else set()
                assert core.graphs.graphed > 0 or lacking, "no step by a graph"
                assert eager.keys() <= {"mixed", "scores", "prompts", *lacking}, f"steps that no graph ran: {eager}"
                return found
            assert core.graphs.graphed > prompts > 0, f"{core.graphs.graphed} steps by graphs, {prompts} of prompts"
            assert eager.keys() <= {"mixed", "scores"}, f"steps that no graph ran: {eager}"
    finally:
        core.close()
    return found
