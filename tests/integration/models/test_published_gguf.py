"""GGUF files that others have published, beside transformers, which reads the same files by its own code: ids of texts,
and the tokens of answers, served whole with hand-offs. The larger file takes 13 GB of memory."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import httpx
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from router.text.gguf_tokenizer import build_tokenizer, read_metadata
from tests.support.bodies.odd_strings import odd_strings
from tests.support.clusters.cluster import baton_up
from tests.support.clusters.metrics_page import total
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models.published import GEMMA, QWEN, Published

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
NEW_TOKENS, TIE = 48, 1e-3
LONG = " ".join(Path(__file__).read_text().split()) + "\n" + " ".join(f"{n} squared is {n * n}." for n in range(60))
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6,",
    LONG,
)  # one beyond Gemma's window


@pytest.mark.parametrize("published", [GEMMA, QWEN], ids=["gemma3", "qwen2"])
def test_tokens_are_those_of_transformers(published: Published, tmp_path: Path) -> None:
    """transformers reads prompt and answer at once: each of our tokens must be its best, or as good as its best."""
    file = published.file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    answers = answers_of(file, tmp_path)
    network = network_of(file)
    for prompt, (ids, answer) in zip(prompts, answers, strict=True):
        assert ids == prompt and len(answer) == NEW_TOKENS
        with torch.inference_mode():
            logits = network(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        behind = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert behind.max() < TIE, f"token {int(behind.argmax())} of an answer is {behind.max():.2e} behind"


def network_of(file: Path) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=network)["tensors"]
    missing, strange = network.load_state_dict(found, strict=False)
    assert {*missing} <= {"lm_head.weight"} and not strange
    network.tie_weights()
    return network.eval()


def answers_of(file: Path, folder: Path) -> list[tuple[list[int], list[int]]]:
    """Each prompt's ids, and the ids of its greedy answer, whose pages were handed over."""
    found = []
    flags = ("--model", str(file), "--served-model-name", "m", "--dtype", "float32", "--max-context", "4096")
    with (
        baton_up(folder / "up.log", *flags) as cluster,
        httpx.Client(base_url=cluster.url, timeout=HANG_GUARD_S) as http,
    ):
        for text in PROMPTS:
            ids = http.post("/tokenize", json={"model": "m", "prompt": text}).raise_for_status().json()["tokens"]
            asked = {"prompt": text, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
            asked |= {"return_tokens_as_token_ids": True}
            answer = http.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]
            tokens = [int(token.removeprefix("token_id:")) for token in answer["logprobs"]["tokens"]]
            found.append((ids, tokens))
        assert total(cluster.metrics(), "baton_handoff_bytes_total") > 0
    return found


@pytest.mark.parametrize("published", [GEMMA, QWEN], ids=["gemma3", "qwen2"])
def test_ids_are_those_of_transformers(published: Published) -> None:
    """It leaves out Qwen's normalization, and merges spaces where Gemma has one entry for up to 31 of them."""
    file = published.file()
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).backend_tokenizer
    ours = build_tokenizer(read_metadata(file))
    texts = [unicodedata.normalize("NFC", text) for text in odd_strings(2000, seed=2) if " " * 32 not in text]
    for text in texts:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids
    assert len(texts) > 1900
