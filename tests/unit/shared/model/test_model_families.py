"""Every family against transformers on tiny random networks: the whole prompt at once, in chunks, and token by token
through the page table, on plain torch and on our own kernels."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.core.errors import ConfigError
from shared.kernel.product.product import supports
from shared.model.formats.opened import LoadOptions
from shared.model.llama.llama import LlamaModel
from shared.model.llama.llama_compiled import CompiledLlama
from shared.model.loading.load import load_model
from tests.support.models.tiny_families import FAMILIES, save
from tests.support.models.tiny_models import Rows, load, prompt, reference


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


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
    for sizes in ([23, 1, 19, 18], [40, *[1] * 21]):
        rows, parts, at = Rows(model, 2, page_size=4), [], 0
        for size in sizes:
            chunks = {0: ids[at : at + size]} | ({1: ids[: 1 + at % 3]} if rows.lens[1] < 50 else {})
            parts.append(rows.step(chunks)[:size])
            at += size
        assert_equal(torch.cat(parts), want)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3-moe", "its experts are chosen while it computes"),
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


def test_one_program_has_the_bits_of_separate_kernels(tmp_path: Path) -> None:
    """Windows, softcaps and two rotations. Other families: test_model_llama.py."""
    save("gemma3, whole", tmp_path)
    program, separate = (load(tmp_path, kernels, "bfloat16") for kernels in ("auto", "separate"))
    if not supports(64, torch.bfloat16):
        pytest.skip("our products don't run on this processor")
    assert isinstance(program, CompiledLlama) and isinstance(separate, LlamaModel)
    program.capture_aux((0, 2))
    separate.capture_aux((0, 2))
    ours, theirs, ids = Rows(program, 2, 16), Rows(separate, 2, 16), prompt(60)
    for chunks, wanted in (({0: ids[:40]}, [39]), ({0: ids[40:41], 1: ids[:9]}, [9, 0, 0]), ({1: ids[9:30]}, [])):
        assert torch.equal(ours.step(chunks, wanted), theirs.step(chunks, wanted))
        assert ours.aux is not None and theirs.aux is not None and torch.equal(ours.aux, theirs.aux)
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
        ("mistral", {"chunk_size_feed_forward": 2}, "chunk_size_feed_forward"),
        ("mistral", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("qwen3", {"num_key_value_heads": ...}, "num_key_value_heads"),
        ("qwen3-moe", {"num_experts": ..., "num_local_experts": ...}, "num_experts"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("qwen3-moe", {"is_encoder_decoder": True}, "is_encoder_decoder"),
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
        load_model(str(rewrite(tmp_path, **changes)), LoadOptions("float32", library="baton"))


def test_a_tensor_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    save("mistral", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    at = "model.layers.0.self_attn."
    unread = [f"rotary_emb.{table}" for table in ("inv_freq", "cos_cached", "sin_cached")]
    unread += ["k_scale", "v_scale", "k_proj.k_scale", "o_proj.input_scale"]
    save_file(tensors | {at + name: torch.ones(1) for name in unread}, path)
    load(tmp_path)
    save_file(tensors | {"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}, path)
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
