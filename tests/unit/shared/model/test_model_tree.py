"""Models over verify windows that are trees: a node's logits are those of its root-to-node path run as a chain."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers

from shared.model.formats.opened import LoadOptions
from shared.model.hashlm.model import HashLM
from shared.model.llama.llama import LlamaModel
from shared.model.llama.llama_compiled import CompiledLlama
from shared.model.loading.load import load_model
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats
from tests.support.cores.draft_trees import draw_parents, path_to
from tests.support.models.tiny_models import Rows

SIZES = transformers.LlamaConfig(
    vocab_size=96,
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
        prompt, window = ([rng.randrange(96) for _ in range(n)] for n in (start, width))
        rows = Rows(model, 1 + width, page_size)
        rows.step({row: prompt for row in range(1 + width)})
        got = rows.step({0: window}, parents=parents)
        for node in range(width):
            want = rows.step({1 + node: [window[n] for n in path_to(parents, node)]})[-1]
            if kind == "torch":
                torch.testing.assert_close(got[node], want, atol=1e-5, rtol=1e-4)
            else:
                assert torch.equal(got[node], want), f"node {node} of {parents}"
