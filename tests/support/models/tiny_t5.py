"""A tiny random T5 with a tokenizer, as a Hugging Face folder, and what transformers answers from it."""

from __future__ import annotations

import string
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

WORDS = ("the", "a", "tide", "baton", "runs", "to", "and", "sea", "translate", "moon", "is", "far", "slow", "quick")
PIECES = ("<pad>", "</s>", "<unk>", "▁", *string.ascii_lowercase, *string.ascii_uppercase, *".,:!?", "é", "🦜",
          *(f"▁{word}" for word in WORDS))  # fmt: skip
PAD, EOS, NUM_SPARE = 0, 1, 3  # spare: rows of the embedding that no piece has, as in the real ones
VOCAB = len(PIECES) + NUM_SPARE


def write_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Unigram with metaspaces and </s> behind every text: what T5's is, without its normalizer's tables."""
    scores = [(piece, 0.0 if piece[0] == "<" else -1.0 - 1.0 / len(piece)) for piece in PIECES]
    inner = tokenizers.Tokenizer(models.Unigram(scores, unk_id=2))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["<pad>", "</s>", "<unk>"])
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", EOS)]
    )
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return inner


def write_tiny_t5(folder: Path, **changes: object) -> transformers.T5ForConditionalGeneration:
    """Its answers wander: they end where they may, and differ by their prompts."""
    write_tokenizer(folder)
    fields: dict[str, object] = dict(
        vocab_size=VOCAB, d_model=24, d_kv=8, d_ff=40, num_layers=2, num_decoder_layers=3, num_heads=3,
        relative_attention_num_buckets=8, relative_attention_max_distance=20, decoder_start_token_id=PAD,
        eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    network = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields | changes)).eval()
    torch.manual_seed(10)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.3)
    network.save_pretrained(folder)
    return network


def greedy(network: transformers.T5ForConditionalGeneration, prompt: list[int], max_tokens: int) -> list[int]:
    """generate's, without the start token."""
    with torch.no_grad():
        ids = network.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, use_cache=False)
    return ids[0, 1:].tolist()


def text_of(folder: Path, ids: list[int]) -> str:
    """transformers' text."""
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    return fast.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
