"""A quantised folder through `baton up`: its answers are those of the weights that the format defines."""

from __future__ import annotations

from pathlib import Path

import httpx
import torch
import transformers
from safetensors.torch import save_file

from tests.support.clusters.cluster import baton_up
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.models.tiny_quantized import write_quantised
from tests.support.web.hub_rig import write_tokenizer

PROMPT, COUNT = [7, 99, 3, 41, 18, 64], 12


def test_a_quantised_folder_is_served_after_a_hand_off(tmp_path: Path) -> None:
    plain, folder, log = tmp_path / "plain", tmp_path / "model", tmp_path / "log"
    write_tokenizer(write_tiny_llama(plain))
    meant = write_quantised(plain, folder, "fp8, ragged blocks")
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    with baton_up(log, "--model", str(folder), "--dtype", "float32", "--kv-bytes", "4MiB") as cluster:
        body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S).json()
        card = httpx.get(f"{cluster.url}/v1/models", timeout=HANG_GUARD_S).json()["data"][0]
    assert answer["choices"][0]["token_ids"] == greedy(plain)
    size = (folder / "model.safetensors").stat().st_size
    assert card["weights"].pop("memory_bytes") > 4 * sum(weight.numel() for weight in meant.values())
    assert card["weights"] == {"stored": "fp8 in blocks of 24 x 40", "held": "float32", "file_bytes": size}
    told = [line for line in log.read_text().splitlines() if "model loaded" in line]
    assert len(told) == 2 and all("fp8 in blocks of 24 x 40" in line for line in told)


def greedy(folder: Path) -> list[int]:
    network = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    told = list(PROMPT)
    with torch.no_grad():
        for _ in range(COUNT):
            told.append(int(network(torch.tensor([told])).logits[0, -1].argmax()))
    return told[len(PROMPT) :]
