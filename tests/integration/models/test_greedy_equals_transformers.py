"""Greedy answers of the default model in float32 equal transformers' on the same dequantised weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from shared.config.models.model_path import bundled_gguf
from shared.kernel.code.step_layout import Layout
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import Model, ModelInputs
from tests.support.models.transformers_model import default_model_in_transformers

PAGE_SIZE, NEW_TOKENS, TIE = 16, 64, 1e-4
TOPICS = ("the tide", "a relay race", "sourdough bread", "the number pi", "a lighthouse", "compound interest", "owls")
ASKS = ("Explain {} to a child.", "Write a short story about {}.", "List five facts about {}.")
PROMPTS = [ask.format(topic) for topic in TOPICS for ask in ASKS][:20]


@pytest.fixture(scope="module")
def network() -> transformers.PreTrainedModel:
    return default_model_in_transformers()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    path: Path = bundled_gguf()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in PROMPTS
    ]


def step(model: Model, pool: KVPool, table: torch.Tensor, rows: list[list[int]], starts: list[int]) -> list[int]:
    """Feeds each row's new ids; the best next id of each."""
    q_lens = [len(ids) for ids in rows]
    bounds = torch.tensor([0, *q_lens]).cumsum(0)
    inputs = ModelInputs(
        input_ids=torch.tensor([i for ids in rows for i in ids]),
        positions=torch.cat([torch.arange(at, at + n) for at, n in zip(starts, q_lens, strict=True)]),
        layout=Layout(
            cu_q_lens=bounds.to(torch.int32),
            page_tables=(table,),
            max_q_len=max(q_lens),
            max_seq_len=max(at + n for at, n in zip(starts, q_lens, strict=True)),
        ),
        logits_idx=bounds[1:] - 1,
    )
    return model.forward(inputs, pool).logits.argmax(-1).tolist()


def generate(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts together: ragged prefill in one step, then decode steps."""
    per_row = -(-(max(map(len, prompts)) + NEW_TOKENS) // PAGE_SIZE)
    pool = KVPool(model.kv_planes(PAGE_SIZE), 1 + per_row * len(prompts), PAGE_SIZE)
    table = torch.arange(1, 1 + per_row * len(prompts), dtype=torch.int32).view(len(prompts), per_row)
    starts = [0] * len(prompts)
    outputs = [[i] for i in step(model, pool, table, prompts, starts)]
    for n in range(NEW_TOKENS - 1):
        starts = [len(prompt) + n for prompt in prompts]
        for output, best in zip(outputs, step(model, pool, table, [o[-1:] for o in outputs], starts), strict=True):
            output.append(best)
    return outputs


@pytest.mark.timeout(1800)
def test_twenty_prompts_of_64_tokens(network: transformers.PreTrainedModel, prompts: list[list[int]]) -> None:
    """transformers reads prompt + our answer at once: if every one of our tokens is its own best next one, its greedy
    answer is ours. A token that lost to its better by less than TIE is a tie and may differ."""
    ties = 0
    with torch.inference_mode():
        answers = generate(load_model("smollm2", LoadOptions("float32", max_context=1024)), prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == NEW_TOKENS
            logits = network(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            behind = logits.amax(-1) - chosen
            assert behind.max() < TIE, f"token {int(behind.argmax())} of an answer is {behind.max():.2e} behind"
            ties += int((behind > 0).sum())
    print(f"{len(prompts)} prompts x {NEW_TOKENS} tokens, {ties} ties")
