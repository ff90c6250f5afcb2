"""The engine on models whose layers are the library's: draft heads, KV in bytes, log-probabilities. What is right, the
library's own forward and `generate` say."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.kernel.code.quantized import DTYPES, dequantize, quantize
from shared.model.library.attend.latents import has_latents
from shared.model.library.model import LibraryModel, use_attention
from shared.model.loading.load import load_eagle_head
from shared.model.math.kernels import Formats
from shared.speculation.eagle import EagleWorkerV2
from tests.support.cores.core_pair import CorePair, make_pair, run_pair
from tests.support.cores.core_rig import Job, assert_whole, make_core, run_local
from tests.support.models.draft_head import VOCAB as HEAD_VOCAB
from tests.support.models.draft_head import head_config, head_tensors, save_head
from tests.support.models.library_families import (
    KNOBS,
    NUM_TOKENS,
    PROMPTS,
    Family,
    assert_captured,
    generate,
    greedy_jobs,
    load,
    make_family,
    save,
)

SHORT = PROMPTS[:3]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Gemma 4: layers of two sizes, with and without a window."""
    return make_family("gemma4_text", tmp_path_factory.mktemp("model") / "gemma4")


# Draft heads


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> tuple[LibraryModel, Path]:
    """gpt-oss, whose layers have a window in turn, and a random head that fits it."""
    folder = tmp_path_factory.mktemp("model")
    save("gpt_oss", folder / "target", vocab_size=HEAD_VOCAB, hidden_size=128)
    model = load(folder / "target")
    assert isinstance(model, LibraryModel)
    return model, save_head(folder / "head", head_tensors(), head_config())


def head_jobs() -> list[Job]:
    """Greedy and seeded, with penalties."""
    seeded = SamplingParams(NUM_TOKENS, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4)
    draws = [SamplingParams(NUM_TOKENS, temperature=0.0), seeded]
    prompts = [tuple(token % HEAD_VOCAB for token in prompt) for prompt in PROMPTS[:3]]
    return [Job(rid, prompt, draws[rid % 2], seed=rid) for rid, prompt in enumerate(prompts)]


def test_a_head_reads_what_layers_read(small: Family) -> None:
    assert_captured(small.network, small.model, SHORT[1])


@pytest.mark.parametrize("topk", [1, 2])
def test_a_head_s_drafts_change_no_stream(topk: int, headed: Any) -> None:
    """Chains and trees, handed over, with retractions."""
    model, folder = headed
    jobs = head_jobs()
    plain = run_local(make_core(KNOBS, model=model), jobs).streams
    knobs = dataclasses.replace(KNOBS, width=4)
    head = load_eagle_head(str(folder), "", model, kernels="torch")
    model.capture_aux(head.aux_layers)
    cores = [make_core(knobs, model=model, drafter=EagleWorkerV2(head, HEAD_VOCAB, topk, steps=2)) for _ in range(2)]
    pair = CorePair(*cores)
    assert run_pair(pair, jobs, retract_every=9, rng=random.Random(1)).streams == plain
    assert sum(core.queues.counters.spec_steps for core in cores) > 0
    for core in cores:
        assert_whole(core)
    pair.close()
    model.capture_aux(())


def test_heads_that_do_not_fit_are_refused(headed: Any, small: Family, tmp_path: Path) -> None:
    _, folder = headed
    with pytest.raises(ConfigError, match="a head for hidden_size 128 does not fit gemma4, which has 64"):
        load_eagle_head(str(folder), "", small.model, kernels="torch")
    save("opt", tmp_path, word_embed_proj_dim=32)
    with pytest.raises(ConfigError, match="its embedding has 32 features and its layers 64, which no draft head"):
        _ = load(tmp_path).embed  # type: ignore[attr-defined]


# KV in bytes


def rounding(
    network: transformers.PreTrainedModel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> transformers.PreTrainedModel:
    """Make the library's own eager attention read keys and values that were rounded to bytes: the definition.

    Keys and values that are made of latents are made of rounded ones. Indexers score rounded keys."""
    update = transformers.Cache.update_indexer
    monkeypatch.setattr(
        transformers.Cache,
        "update_indexer",
        lambda cache, keys, layer: update(cache, dequantize(*quantize(keys, dtype)), layer),
    )
    latent = [module for module in network.modules() if has_latents(module)]
    if latent:
        for module in latent:
            expand = module.expand_kv
            module.expand_kv = lambda *pair, expand=expand: expand(*(dequantize(*quantize(x, dtype)) for x in pair))
        return network
    eager = sys.modules[type(network).__module__].eager_attention_forward

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any
    ) -> Any:
        key, value = (dequantize(*quantize(one, dtype)) for one in (key, value))
        return eager(module, query, key, value, *args, **more)

    use_attention(network, attend, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    return network


@pytest.mark.parametrize(("name", "kv"), [("gpt_oss", "int8"), ("deepseek_v3", "fp8"), ("deepseek_v32", "int8")])
def test_kv_in_bytes_is_rounded_by_token_and_head(
    name: str, kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, hand-offs and retractions give the library's answers with rounded keys and values."""
    network = save(name, tmp_path)
    exact = [generate(network, prompt, NUM_TOKENS).ids for prompt in PROMPTS[:3]]
    model = load(tmp_path, formats=Formats(kv=kv))
    assert isinstance(model, LibraryModel) and f"with KV in {kv} they differ by" in model.report
    num_planes = 2 if name == "deepseek_v32" else 1
    assert [plane.dtype for plane in model.kv_planes(8)] == [DTYPES[kv], torch.float32] * num_planes
    rounded = rounding(network, DTYPES[kv], monkeypatch)
    said = [generate(rounded, prompt, NUM_TOKENS) for prompt in PROMPTS[:3]]
    pair = make_pair(KNOBS, model=model)
    outcome = run_pair(pair, greedy_jobs()[:3], retract_every=5, rng=random.Random(1))
    pair.close()
    Family(name, tmp_path, network, model, said).assert_said([outcome.streams[f"r{rid}"] for rid in range(3)])
    assert [one.ids for one in said] != exact


# Log-probabilities


def test_log_probabilities_are_the_library_s(small: Family) -> None:
    core = make_core(KNOBS, model=small.model)
    params = SamplingParams(NUM_TOKENS, temperature=0.0, num_logprobs=3)
    outcome = run_local(core, [Job(rid, prompt, params, seed=0) for rid, prompt in enumerate(SHORT)])
    core.close()
    for rid, prompt in enumerate(SHORT):
        stream = outcome.streams[f"r{rid}"]
        with torch.inference_mode():
            logits = small.network(torch.tensor([[*prompt, *stream]])).logits[0, len(prompt) - 1 : -1]
        right = logits.log_softmax(dim=-1)
        for token, found, row in zip(stream, outcome.logprobs[f"r{rid}"], right, strict=True):
            best = row.topk(3)
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-3)
            assert found.top_ids == tuple(best.indices.tolist())
            assert found.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-3)
