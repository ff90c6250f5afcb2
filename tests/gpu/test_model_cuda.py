"""The plain torch kernels on CUDA give the CPU's logits, for prefill chunks, decode rows and verify windows."""

from __future__ import annotations

import pytest
import torch
import transformers

from shared.kv.pool import KVPool
from shared.model.interface import ModelInputs
from shared.model.load import load_model
from shared.model.opened import LoadOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SPANS = [{0: (0, 40)}, {0: (40, 41), 1: (0, 5)}, {0: (41, 44), 1: (5, 30)}]  # row: tokens [from, to) of each step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("qwen3")
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


def logits(folder: str, device: str) -> torch.Tensor:
    model = load_model(folder, LoadOptions("float32"), device)
    pool = KVPool(model.kv_planes(16), 9, 16, device)
    ids = torch.randint(0, 97, (2, 64), generator=torch.Generator().manual_seed(1))
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    parts = []
    for spans in SPANS:
        lens = [stop - start for start, stop in spans.values()]
        inputs = ModelInputs(
            input_ids=torch.cat([ids[row, start:stop] for row, (start, stop) in spans.items()]).to(device),
            positions=torch.cat([torch.arange(*span) for span in spans.values()]).to(device),
            cu_q_lens=torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32),
            page_table=table[list(spans)].to(device),
            logits_idx=torch.arange(sum(lens), device=device),
            max_q_len=max(lens),
            max_seq_len=max(stop for _, stop in spans.values()),
        )
        with torch.inference_mode():
            parts.append(model.forward(inputs, pool).logits.cpu())
    return torch.cat(parts)


def test_cuda_equals_cpu(folder: str) -> None:
    torch.testing.assert_close(logits(folder, "cuda"), logits(folder, "cpu"), atol=2e-4, rtol=1e-3)
