"""Answers of this processor's kernels replay equal on older processors: a fingerprint does not name the processor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize

from router.certify.record import ShownAnswer
from shared.core import launcher
from shared.core.sampling_params import SamplingParams
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats
from tests.support.cores.certified_replays import resumed, shown_answers, write_log
from tests.support.cores.core_pair import make_pair, run_pair
from tests.support.cores.core_rig import CoreKnobs, Job, make_core, run_local
from tests.support.machine.processors import run_python
from tests.support.models.tiny_gguf import VOCAB, network, write

DRAFTED = CoreKnobs(spec="ngram", width=4)
FORMATS = {"codes": Formats(kv="int8", weights="codes"), "bfloat16": Formats()}  # codes: auto with AMX
NUM_JOBS = 6


def tiny(folder: Path) -> str:
    matrices = {name: value for name, (value, _) in network("llama").items() if value.ndim > 1}
    blocks = {name: (quantize(value, Kind.Q4_0), Kind.Q4_0) for name, value in matrices.items()}
    return str(write(folder / "tiny.gguf", blocks))


def jobs_from(first: int) -> list[Job]:
    """Of each way other prompts."""
    draws = [SamplingParams(12, temperature=0.0), SamplingParams(12, temperature=0.9)]
    numbers = range(first, first + NUM_JOBS)
    return [Job(n, tuple((n + at * 7) % VOCAB for at in range(5 + n)), draws[n % 2], seed=n) for n in numbers]


def drafted(model: Model) -> Iterator[ShownAnswer]:
    """With retractions."""
    core, jobs = make_core(DRAFTED, model=model), jobs_from(0)
    yield from shown_answers(core, jobs, run_local(core, jobs, retract_every=5, rng=random.Random(1))).values()
    core.close()


def handed_over(model: Model) -> Iterator[ShownAnswer]:
    pair, jobs = make_pair(DRAFTED, model=model), jobs_from(NUM_JOBS)
    yield from shown_answers(pair.decode, jobs, run_pair(pair, jobs)).values()
    pair.close()


def resumed_answers(model: Model) -> Iterator[ShownAnswer]:
    dead, heir, jobs = make_core(CoreKnobs(), model=model), make_core(DRAFTED, model=model), jobs_from(2 * NUM_JOBS)
    yield from shown_answers(heir, jobs, resumed(dead, heir, jobs, 5)).values()
    dead.close()
    heir.close()


@pytest.fixture(scope="module", params=FORMATS)
def replay(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the command that replays answers of this processor, drafted, handed over and resumed."""
    folder = tmp_path_factory.mktemp("answers")
    path = tiny(folder)
    model = load_model(path, LoadOptions(formats=FORMATS[request.param]))
    shown = [one for way in (drafted, handed_over, resumed_answers) for one in way(model)]
    assert len(shown) == 3 * NUM_JOBS
    flags = (*write_log(folder, shown), "--model", path, "--kv-bytes", "4MiB")
    return (*launcher.command("deploy.cli", "replay")[1:], *flags)


@pytest.mark.parametrize("processor", ["haswell", "skylake-avx512"])
def test_an_older_processor_replays_equal(replay: tuple[str, ...], processor: str, tmp_path: Path) -> None:
    """It takes the certificate's formats, though `auto` chooses others there."""
    there = run_python(processor, tmp_path, *replay)
    assert there.stdout.startswith("18 equal, 0 different, 0 not computed"), there.stdout + there.stderr
    assert there.returncode == 0
