"""Models over verify windows that are trees: a node's logits are those of its root-to-node path run as a chain."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from shared.kernel.code.step_layout import Layout
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.hashlm.model import HashLM
from shared.model.llama.llama import LlamaModel
from shared.model.llama.llama_compiled import CompiledLlama
from shared.model.loading.load import load_model
from shared.model.math.interface import Model, ModelInputs
from shared.model.math.kernels import Formats
from tests.support.cores.draft_trees import depths, draw_parents, path_to, visible_bits

VOCAB, MAX_LEN = 96, 80
SIZES = transformers.LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=128,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=256,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(SIZES).save_pretrained(path)
    return path


class Row:
    """One sequence over pages scattered in a pool of its own."""

    def __init__(self, model: Model, page_size: int, order: int = 0) -> None:
        self.model = model
        num_pages = -(-MAX_LEN // page_size)
        self.kv = KVPool(model.kv_planes(page_size), 1 + num_pages, page_size)
        self.table = torch.from_numpy(np.random.default_rng(order).permutation(num_pages).astype(np.int32) + 1)[None]

    def inputs(self, ids: list[int], start: int, parents: list[int] | None = None) -> ModelInputs:
        slots = start + torch.arange(len(ids))
        chain = ModelInputs(
            input_ids=torch.tensor(ids),
            positions=slots,
            layout=Layout(
                cu_q_lens=torch.tensor([0, len(ids)], dtype=torch.int32),
                page_tables=(self.table,),
                max_q_len=len(ids),
                max_seq_len=start + len(ids),
            ),
            logits_idx=torch.arange(len(ids)),
        )
        if parents is None:
            return chain
        return replace(
            chain, positions=start + torch.tensor(depths(parents)), slots=slots, visible=visible_bits(parents)
        )

    def step(self, ids: list[int], start: int, parents: list[int] | None = None) -> torch.Tensor:
        return self.model.forward(self.inputs(ids, start, parents), self.kv).logits


def make(kind: str, folder: Path) -> Model:
    if kind == "hashlm":
        return HashLM()
    kernels, formats = "torch" if kind == "torch" else "auto", Formats("int8" if "int8" in kind else "auto")
    model = load_model(str(folder), LoadOptions("float32", kernels=kernels, formats=formats))
    assert isinstance(model, LlamaModel if kind == "torch" else CompiledLlama)
    return model


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["hashlm", "torch", "compiled", "compiled, int8"])
def test_every_node_is_its_path_run_as_a_chain(kind: str, page_size: int, folder: Path) -> None:
    model = make(kind, folder)
    for seed in range(4):
        rng = random.Random(seed)
        width, start = rng.choice([2, 5, 16]), rng.choice([1, 14, 40])
        parents = draw_parents(rng, width)
        prompt, window = ([rng.randrange(VOCAB) for _ in range(n)] for n in (start, width))
        row, alone = Row(model, page_size), Row(model, page_size, 1)
        row.step(prompt, 0)
        got = row.step(window, start, parents)
        for node in range(width):
            alone.step(prompt, 0)
            want = alone.step([window[n] for n in path_to(parents, node)], start)[-1]
            if kind == "torch":
                torch.testing.assert_close(got[node], want, atol=1e-5, rtol=1e-4)
            else:
                assert torch.equal(got[node], want), f"node {node} of {parents}"


@pytest.mark.parametrize("wrong", ["sibling", "parent", "position", "slot"])
def test_hashlm_notices_a_window_laid_out_wrongly(wrong: str) -> None:
    """Else the equality above would say nothing of streams."""
    row, parents = Row(HashLM(), 4), [0, 0, 1, 2]
    prompt, window = list(range(30, 41)), [5, 6, 7, 8, 9]
    row.step(prompt, 0)
    right = row.step(window, 11, parents)
    inputs = row.inputs(window, 11, parents)
    assert inputs.visible is not None and inputs.slots is not None
    match wrong:
        case "sibling":
            inputs.visible[4] |= 0b10
        case "parent":
            inputs.visible[4] ^= 0b100
        case "position":
            inputs.positions = inputs.slots
        case "slot":
            inputs.slots = inputs.positions
    wrong_logits = row.model.forward(inputs, row.kv).logits
    assert torch.equal(wrong_logits[0], right[0]) and not torch.equal(wrong_logits[4], right[4])
