"""Every family against transformers on tiny random networks: the whole prompt at once, in chunks, and token by token
through the page table, on plain torch and on our own kernels."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, Rows, load, prompt, reference, save_random

from shared.core.errors import ConfigError
from shared.kernel.product import supports
from shared.model.llama import LlamaModel
from shared.model.llama_compiled import CompiledLlama

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WHOLE = SIZES | {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
MOE = SIZES | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA = SIZES | {"pad_token_id": 0, "num_key_value_heads": 1, "sliding_window": 7, "query_pre_attn_scalar": 24}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
Make = Callable[[], transformers.PreTrainedModel]


def llama(**changes: Any) -> Make:
    return lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


def qwen2(**changes: Any) -> Make:
    sizes = {name: value for name, value in (SIZES | changes).items() if name != "head_dim"}
    return lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))


def qwen3(**changes: Any) -> Make:
    return lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SIZES | changes)))


def moe(**changes: Any) -> Make:
    return lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(MOE | changes)))


def mistral(**changes: Any) -> Make:
    return lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**(SIZES | changes)))


def gemma(**changes: Any) -> Make:
    return lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**(GEMMA | changes)))


FAMILIES: dict[str, Make] = {
    "llama, llama3 rope": llama(rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32}),
    "llama, linear rope": llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama, dynamic rope": llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "llama, yarn": llama(rope_parameters=YARN),
    "llama, yarn with all fields": llama(
        rope_parameters=YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3}
    ),
    "qwen2": qwen2(),
    "qwen2, yarn, tied": qwen2(rope_parameters=YARN, tie_word_embeddings=True),
    "qwen2, upper layers windowed": qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=2),
    "qwen3": qwen3(),
    "qwen3, odd size": qwen3(intermediate_size=80),
    "qwen3, biases": qwen3(attention_bias=True),
    "qwen3-moe": moe(),
    "qwen3-moe, normalised": moe(norm_topk_prob=True),
    "qwen3-moe, every second layer": moe(decoder_sparse_step=2, mlp_only_layers=[3]),
    "qwen3-moe, windowed": moe(use_sliding_window=True, sliding_window=5),
    "mistral": mistral(sliding_window=None),
    "mistral, windowed": mistral(sliding_window=10),
    "mistral, windowed, whole": mistral(**(WHOLE | {"sliding_window": 10})),
    "mistral, window of one": mistral(sliding_window=1),
    "gemma3": gemma(layer_types=["sliding_attention", "full_attention"] * 2),
    "gemma3, all layers windowed": gemma(),
    "gemma3, stretched, capped": gemma(
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        rope_parameters=GEMMA_ROPE,
        final_logit_softcapping=3.0,
    ),
    "gemma3, whole": gemma(
        num_key_value_heads=2, layer_types=["sliding_attention", "full_attention"] * 2, final_logit_softcapping=3.0
    ),
    "gemma3, untied": gemma(tie_word_embeddings=False, layer_types=["full_attention", "sliding_attention"] * 2),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def save(family: str, folder: Path) -> transformers.PreTrainedModel:
    return save_random(FAMILIES[family](), folder)


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, kernels: str, tmp_path: Path) -> None:
    network = save(family, tmp_path)
    ids = prompt(61)
    want = reference(network, ids)
    assert want.std() > 0.1
    model = load(tmp_path, kernels)
    assert_equal(Rows(model, 1, 16).step({0: ids}), want)
    for sizes in ([23, 1, 19, 18], [5] * 12 + [1], [40, *[1] * 21]):
        rows, parts, at = Rows(model, 2, page_size=4), [], 0
        for size in sizes:
            chunks = {0: ids[at : at + size]} | ({1: ids[: 1 + at % 3]} if rows.lens[1] < 50 else {})
            parts.append(rows.step(chunks)[:size])
            at += size
        assert_equal(torch.cat(parts), want)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3-moe", "experts are chosen as it runs"),
        ("gemma3", "no multiple of 64"),
        ("gemma3, whole", None),
        ("qwen3, odd size", "no multiple of 64"),
        ("mistral, windowed, whole", None),
    ],
)
def test_what_runs_kernel_by_kernel_says_so(
    family: str, reason: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(family, tmp_path)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path, "auto")
    assert isinstance(model, CompiledLlama if reason is None else LlamaModel)
    said = [record.message for record in caplog.records if "kernel by kernel" in record.message]
    assert len(said) == (reason is not None)
    assert all(str(reason) in message for message in said)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_program_has_the_bits_of_separate_kernels(dtype: str, tmp_path: Path) -> None:
    save("gemma3, whole", tmp_path)
    program, separate = (load(tmp_path, kernels, dtype) for kernels in ("auto", "separate"))
    if not supports(64, getattr(torch, dtype)):
        pytest.skip("our products don't run on this processor")
    assert isinstance(program, CompiledLlama) and isinstance(separate, LlamaModel)
    program.capture_aux((0, 2))
    separate.capture_aux((0, 2))
    ours, theirs, ids = Rows(program, 2, 16), Rows(separate, 2, 16), prompt(60)
    for chunks, wanted in (({0: ids[:40]}, [39]), ({0: ids[40:41], 1: ids[:9]}, [9, 0, 0]), ({1: ids[9:30]}, [])):
        assert torch.equal(ours.step(chunks, wanted), theirs.step(chunks, wanted))
    assert torch.equal(ours.pool.plane("kv").nan_to_num(), theirs.pool.plane("kv").nan_to_num())


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_pages_that_left_the_window_are_not_looked_at(kernels: str, tmp_path: Path) -> None:
    """Whoever frees them may give them to others, whose content may be anything."""
    network = save("mistral, windowed", tmp_path)
    ids = prompt(40)
    rows = Rows(load(tmp_path, kernels), 1, page_size=4)
    rows.step({0: ids[:32]})
    first_read = 33 - 10
    rows.pool.plane("kv")[rows.table[0, : first_read // 4].long()] = float("nan")
    assert_equal(rows.step({0: ids[32:33]}), reference(network, ids)[32:33])


def rewrite(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mistral", {"attention_multiplier": 0.5}, "attention_multiplier"),
        ("mistral", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("qwen3", {"num_key_value_heads": ...}, "num_key_value_heads"),
        ("qwen3-moe", {"num_experts": ..., "num_local_experts": ...}, "num_experts"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("qwen3-moe", {"n_group": 4}, "n_group"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        ("qwen2", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "twist": 3}}, "twist"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    family: str, changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    save(family, tmp_path)
    with pytest.raises(ConfigError, match=named):
        load(rewrite(tmp_path, **changes))


def test_a_tensor_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    save("mistral", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, path)
    load(tmp_path)
    save_file(tensors | {"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}, path)
    with pytest.raises(ConfigError, match="mistral has no tensor model.layers.1.self_attn.q_proj.bias"):
        load(tmp_path)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"has no tensor model.layers.3.mlp.up_proj.weight"):
        load(tmp_path)


def test_a_tied_head_may_be_there_twice_but_not_differ(tmp_path: Path) -> None:
    save("gemma3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embed = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embed.clone()}, path)
    load(tmp_path)
    save_file(tensors | {"lm_head.weight": embed + 1.0}, path)
    with pytest.raises(ConfigError, match="lm_head.weight is not the embedding"):
        load(tmp_path)


def test_older_files_of_gemma3(tmp_path: Path) -> None:
    """Before there were layer_types: a pattern, and the local base beside the other."""
    save("gemma3", tmp_path)
    old = rewrite(
        tmp_path,
        layer_types=...,
        rope_parameters=...,
        _sliding_window_pattern=...,
        tie_word_embeddings=...,
        sliding_window_pattern=2,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    config = load(old).config
    assert config.windows == (7, 0, 7, 0) and config.tie_embeddings
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 2.0, 1e6)
    assert config.local_rope is not None and (config.local_rope.kind, config.local_rope.theta) == ("default", 1e4)


def test_yarn_makes_the_context_longer(tmp_path: Path) -> None:
    save("qwen2, yarn, tied", tmp_path)
    assert load(rewrite(tmp_path, max_position_embeddings=32)).spec.max_context == 128
