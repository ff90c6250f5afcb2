"""Tiny random networks of families that the library transformers runs, and what its own `generate` says of them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from shared.core.sampling_params import SamplingParams
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kv.layout import page_windows
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.library.kinds import network_kind
from shared.model.library.model import LibraryModel
from shared.model.loading.load import load_model
from shared.model.math.interface import Model, ModelInputs
from tests.support.cores.core_pair import make_pair, run_pair
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, assert_whole

VOCAB = 211
TIE = 1e-4  # share of the largest score; two best scores that are nearer may change places
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 16}
GEMMA = WINDOW | {"query_pre_attn_scalar": 16}
TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED = ROUTED | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
}
INDEXED = LATENT | GROUPED | {"index_head_dim": 32, "index_n_heads": 16, "index_topk": 24}
# Kinds of models that are refused.
REFUSED: dict[str, dict[str, Any]] = {
    "bert": {"architectures": ["BertForMaskedLM"]},
    "bloom": {},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "minimax": {},
    "mpt": {},
    "pix2struct": {"architectures": ["Pix2StructForConditionalGeneration"]},
    "qwen3_next": EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "rwkv": {},
}
# What a family's config needs beside SIZES.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": EXPERTS | WINDOW | TURNS | {"moe_intermediate_size": 32},
    "apertus": {},
    "apertus1p5_text": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "axk1": LATENT | GROUPED,
    "beam": EXPERTS
    | WINDOW
    | TURNS
    | {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"] * 2},
    "biogpt": {},
    "axk2": INDEXED,
    "bitnet": {},
    "cohere": {},
    "cohere2": WINDOW,
    "cohere2_moe": EXPERTS | WINDOW | TURNS,
    "ctrl": {},
    "cwm": WINDOW | TURNS,
    "deepseek_v2": LATENT | GROUPED,
    "deepseek_v3": LATENT | GROUPED,
    "dots1": GROUPED | {"n_shared_experts": 1},
    "deepseek_v32": INDEXED,
    "diffllama": {},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone": {},
    "exaone4": WINDOW,
    "exaone_moe": EXPERTS | WINDOW | {"moe_intermediate_size": 32},
    "flex_olmo": EXPERTS,
    "gemma": {},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gemma4_text": WINDOW
    | {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "global_head_dim": 32},
    "gemma4_unified_text": WINDOW | TURNS,
    "glm": {},
    "glm4": {},
    "glm4_moe": GROUPED,
    "glm4_moe_lite": LATENT | ROUTED,
    "glm_moe_dsa": INDEXED | {"indexer_types": ["full", "shared"] * 2},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": LOCAL | WINDOW,
    "granite": {},
    "granite_swa": WINDOW | TURNS,
    "granitemoe": LOCAL,
    "granitemoe_swa": LOCAL | WINDOW | TURNS,
    "granitemoeshared": LOCAL,
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": EXPERTS | {"moe_intermediate_size": 32},
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "hy_v4": INDEXED,
    "jais2": {},
    "jetmoe": LOCAL,
    "kolibri1": LOCAL | WINDOW | TURNS | {"moe_intermediate_size": 32},
    "laguna": EXPERTS | {"moe_intermediate_size": 32},
    "llama": {},
    "llama4_text": LOCAL | {"attention_chunk_size": 16, "floor_scale": 8, "intermediate_size_mlp": 96},
    "longcat_flash": LATENT | ROUTED | {"zero_expert_num": 2, "expert_ffn_hidden_size": 32},
    "mellum": EXPERTS | WINDOW | TURNS | {"moe_intermediate_size": 32},
    "mimo_v2_flash": ROUTED | WINDOW | {"head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 1},
    "minicpm3": LATENT,
    "minimax_m2": LOCAL,
    "minimax_m3_vl_text": LOCAL,
    "ministral": WINDOW,
    "ministral3": {},
    "mistral": WINDOW,
    "mixtral": LOCAL,
    "modernbert-decoder": WINDOW | TURNS,
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": EXPERTS,
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": LOCAL,
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 32},
    "sarvam_mla": LATENT | GROUPED | {"q_lora_rank": None},
    "sarvam_moe": GROUPED,
    "seed_oss": {},
    "smollm3": {},
    "solar_open": ROUTED | {"n_group": 1, "topk_group": 1},
    "stablelm": {},
    "starcoder2": {},
    "step3p7": WINDOW
    | {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
    },
    "vaultgemma": GEMMA | TURNS,
    "youtu": LATENT,
}
# Families with two sets of rotary factors: for texts of up to BOUND tokens, and for longer ones.
BOUND = 64
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
    "rope_theta": 1e4,
    "original_max_position_embeddings": BOUND,
}
TWO_FACTORS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": BOUND},
    "phimoe": {"rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}},
}
# Kinds whose fields are those of a part of the config: what the other parts need.
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
NESTED: dict[str, dict[str, Any]] = {"step3p7": {"vision_config": VISION}}


def write_config(family: str, folder: Path) -> None:
    """Write a folder of one of REFUSED. Nobody can read its weights."""
    folder.joinpath("model.safetensors").write_bytes(b"no weights")
    fields = SIZES | {"architectures": [f"{family}ForCausalLM"]} | REFUSED[family]
    if family == "pix2struct":
        fields = REFUSED[family]
    transformers.CONFIG_MAPPING[family](**fields).save_pretrained(folder)


def network_of(family: str, **changes: Any) -> transformers.PreTrainedModel:
    fields = SIZES | (FAMILIES | REFUSED)[family] | changes
    if family in NESTED:
        fields = NESTED[family] | {"text_config": fields}
    return drawn_network(transformers.CONFIG_MAPPING[family](**fields))


def drawn_network(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """The whole network, with wide random weights: with narrow ones a wrong mask would hardly show."""
    torch.manual_seed(0)
    whole = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    kind = whole or network_kind(config) or transformers.AutoModelForCausalLM
    network: transformers.PreTrainedModel = kind._from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, value in network.named_parameters():
            if value.dim() > 1 or "sink" in name:
                value.normal_(0, 0.15)
    return network.eval()


def save(family: str, folder: Path, **changes: Any) -> transformers.PreTrainedModel:
    network = network_of(family, **changes)
    network.save_pretrained(folder)
    return network


def write_tokenizer(folder: Path) -> None:
    """One token for a byte, as far as they go, and at last one that ends a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 1]
    inner = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    inner.save(str(folder / "tokenizer.json"))


def load(folder: Path, dtype: str = "float32", **options: Any) -> Model:
    return load_model(str(folder), LoadOptions(dtype, library="transformers", **options))


def prompts(count: int, longest: int = 60) -> list[tuple[int, ...]]:
    """Every second one begins as the first does, so that the prefix cache matters."""
    rng = random.Random(3)
    stem = [rng.randrange(3, VOCAB) for _ in range(longest * 2 // 3)]
    drawn = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(5, longest))] for _ in range(count)]
    return [tuple((stem + ids)[:longest]) if number % 2 else tuple(ids) for number, ids in enumerate(drawn)]


@dataclasses.dataclass(frozen=True)
class Said:
    """The library's greedy answer. `margins`: how far the two best scores are apart, in shares of the largest."""

    ids: list[int]
    margins: list[float]

    def tie(self, ours: Sequence[int]) -> int | None:
        """Return where `ours` differs at a tie; None if it is equal. Any other difference is an AssertionError."""
        assert len(ours) == len(self.ids), f"{len(ours)} tokens instead of {len(self.ids)}"
        for position, (a, b) in enumerate(zip(ours, self.ids, strict=True)):
            if a != b:
                margin = self.margins[position]
                assert margin <= TIE, f"token {position} is {a} instead of {b}, and the two best are {margin:.1e} apart"
                return position
        return None


def generate(
    network: transformers.PreTrainedModel,
    prompt: Sequence[int],
    num_tokens: int,
    eos: int | None = None,
    **more: Any,
) -> Said:
    settings = transformers.GenerationConfig(
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=network.config.get_text_config().vocab_size
        if eos is None
        else eos,  # no token; given None, the network's own ends
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = network.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, **more)
    best = [scores[0].topk(2).values for scores in answer.scores]
    margins = [float((two[0] - two[1]) / scores.abs().max()) for two, scores in zip(best, answer.scores, strict=True)]
    return Said(answer.sequences[0, len(prompt) :].tolist(), margins)


NUM_TOKENS = 14
PROMPTS = prompts(5)
KNOBS = CoreKnobs("simulated", chunk_size=16, page_size=8, num_pages=120)


@dataclasses.dataclass(frozen=True)
class Family:
    name: str
    folder: Path
    network: transformers.PreTrainedModel
    model: LibraryModel
    said: list[Said]  # answers to PROMPTS

    def assert_said(self, streams: Sequence[Sequence[int]]) -> None:
        for stream, said in zip(streams, self.said, strict=True):
            tie = said.tie(stream)
            print(f"{self.name}: equal" if tie is None else f"{self.name}: a tie at token {tie}")


def make_family(name: str, folder: Path) -> Family:
    return loaded_family(name, folder, save(name, folder))


def loaded_family(name: str, folder: Path, network: transformers.PreTrainedModel) -> Family:
    """`network`: what answers like the folder."""
    model = load(folder)
    assert isinstance(model, LibraryModel)
    return Family(name, folder, network, model, [generate(network, prompt, NUM_TOKENS) for prompt in PROMPTS])


def assert_captured(network: transformers.PreTrainedModel, model: LibraryModel, prompt: Sequence[int]) -> None:
    """What a draft head gets, in chunks, is what the library itself says that layers read."""
    layers, ids = (0, 2, 3), torch.tensor(prompt)
    with torch.inference_mode():
        hidden = network(ids[None], output_hidden_states=True).hidden_states
    model.capture_aux(layers)
    num_groups, found = len(page_windows(model.kv_planes(8))), []
    pool = KVPool(model.kv_planes(8), 1 + 11 * num_groups, 8)
    tables = torch.arange(1, 1 + 11 * num_groups, dtype=torch.int32).view(num_groups, 1, 11).unbind()
    for start, stop in itertools.pairwise((0, 7, 8, len(ids))):
        bounds = np.asarray([0, stop - start], np.int32)
        host = HostLengths(bounds, np.asarray([start]), 0)
        layout = Layout(torch.from_numpy(bounds), tables, stop - start, stop, host=host)
        inputs = ModelInputs(ids[start:stop], torch.arange(start, stop), layout, torch.tensor([0]))
        with torch.inference_mode():
            found.append(model.forward(inputs, pool).aux)
    model.capture_aux(())
    torch.testing.assert_close(
        torch.cat(found), torch.cat([hidden[layer][0] for layer in layers], dim=-1), atol=1e-4, rtol=1e-4
    )


def greedy_jobs(first: int = 0) -> list[Job]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    return [Job(first + rid, prompt, params, seed=rid) for rid, prompt in enumerate(PROMPTS)]


def streams_of(outcome: Outcome, first: int = 0) -> list[list[int]]:
    return [outcome.streams[f"r{first + rid}"] for rid in range(len(PROMPTS))]


def assert_served(family: Family) -> None:
    """Every answer, handed over in chunks, with retractions; then again, with the prompts in the caches."""
    pair = make_pair(KNOBS, model=family.model)
    for first in (0, 10):
        run_pair(pair, greedy_jobs(first), retract_every=9, rng=random.Random(1))
        family.assert_said(streams_of(pair.outcome, first))
    for core in (pair.prefill, pair.decode):
        assert_whole(core)
    pair.close()
