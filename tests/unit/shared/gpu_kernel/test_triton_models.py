"""Whole models and whole cores on Triton's attention, in its interpreter: the reference's logits and streams."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.kernel.attention.attention import AttentionBackend, TorchAttention
from shared.kernel.attention.rope import inverse_frequencies, rope_tables
from shared.kernel.team.team import Team
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.config import LlamaConfig
from shared.model.math.kernels import Formats, pick_kernels
from tests.support.cores.core_rig import Job, assert_whole, run_local
from tests.support.gpus.cuda_core import Kind, folder_of, make_core
from tests.support.gpus.cuda_jobs import jobs_for
from tests.support.models.tiny_families import FAMILIES
from tests.support.models.tiny_models import Rows, prompt

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
attention = interpreter.kernels("attention")

DENSE = [name for name in FAMILIES if "moe" not in name]


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overflow of whole numbers is not looked for, which takes two thirds of the time."""
    monkeypatch.setattr(interpreter.grids.interpreter_builder, "options", interpreter.UNCHECKED)


def logits(folder: str, kernels: str, kv: str = "auto") -> torch.Tensor:
    rows = Rows(load_model(folder, LoadOptions("float32", kernels=kernels, formats=Formats(kv=kv))), 2, 4)
    steps = [{0: prompt(21, 1)}, {1: prompt(3, 2), 0: [5]}, {0: [7], 1: [9]}]
    return torch.cat([rows.step(step) for step in steps])


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.long if "," in name else []) for name in DENSE],
)
def test_every_dense_family_has_the_reference_s_logits(family: str) -> None:
    folder = str(folder_of(family))
    torch.testing.assert_close(logits(folder, "triton"), logits(folder, "torch"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_quantized_kv_has_the_reference_s_logits(kv: str) -> None:
    """But for a byte here and there, which a norm's order of sums rounds the other way."""
    folder = str(folder_of("qwen3"))
    torch.testing.assert_close(logits(folder, "triton", kv), logits(folder, "torch", kv), atol=1e-3, rtol=1e-3)


KINDS = {
    "none": Kind(),
    "n-gram": Kind(spec="ngram"),
    "chain": Kind(spec="chain"),
    "tree": Kind(spec="tree"),
    "int8": Kind(kv="int8"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_stream_of_each_kind_of_draft_is_the_reference_s(name: str) -> None:
    """8 tokens behind a prompt of two chunks, drawn with a temperature."""
    kind, found = KINDS[name], []
    for kernels in ("torch", "triton"):
        core = make_core(kind, kernels=kernels)
        asked = [eight_tokens(jobs_for(kind, core.settings.adapters.digests, 2)[1])]
        outcome = run_local(core, asked, rng=random.Random(1))
        assert_whole(core)
        core.close()
        assert all(end.error is None for end in outcome.ends.values())
        found.append(outcome.streams)
    assert found[0] == found[1] and [len(stream) for stream in found[0].values()] == [8]


def eight_tokens(job: Job) -> Job:
    return replace(job, sampling=SamplingParams(8, temperature=0.8))


def test_a_gpu_gets_triton_s_attention_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are the library's."""
    config = load_model(str(folder_of("qwen3")), LoadOptions("float32", kernels="torch")).config  # type: ignore[attr-defined]
    tables = rope_tables(inverse_frequencies(config.head_dim, 1e4), 8)

    def picked(asked: str = "auto", config: LlamaConfig = config) -> AttentionBackend:
        kernels = pick_kernels(config, torch.bfloat16, torch.device("cuda"), Team(), asked)
        return kernels.make_attention(tables, None)

    assert isinstance(picked(), attention.TritonAttention) and isinstance(picked("torch"), TorchAttention)
    assert isinstance(picked(config=replace(config, head_dim=320)), TorchAttention)
    monkeypatch.setattr("shared.model.math.kernels.has_triton", lambda: False)
    assert isinstance(picked(), TorchAttention)


def test_bfloat16_is_refused_in_the_interpreter() -> None:
    with pytest.raises(ConfigError, match="float32"):
        load_model(str(folder_of("qwen3")), LoadOptions("bfloat16", kernels="triton"))
