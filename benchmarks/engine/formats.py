"""What number formats cost: how often another one, reading the float32 model's greedy text, would choose another token.

python -m benchmarks.engine.formats [--model smollm2] [--texts 8] [--tokens 64]
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.engine_model import PagedRows, sample_texts
from shared.config.models.model_path import resolve_model
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats

CONTENDERS = {
    "bfloat16": ("bfloat16", Formats()),
    "KV int8": ("float32", Formats(kv="int8")),
    "KV fp8": ("float32", Formats(kv="fp8")),
    "weights int8": ("float32", Formats(weights="int8")),
    "weights file": ("float32", Formats(weights="file")),
    "weights int8, bfloat16": ("bfloat16", Formats(weights="int8")),
    "weights file, bfloat16": ("bfloat16", Formats(weights="file")),
    "weights int8, KV int8, bfloat16": ("bfloat16", Formats("int8", "int8")),
    "weights file, KV int8, bfloat16": ("bfloat16", Formats("int8", "file")),
    "weights fp8": ("float32", Formats(weights="fp8")),
    "both int8, bfloat16": ("bfloat16", Formats("int8", "int8")),
    "both fp8, bfloat16": ("bfloat16", Formats("fp8", "fp8")),
}


def greedy(model: Model, text: list[int], count: int) -> list[int]:
    """text and what follows it."""
    rows = PagedRows(model, 1, len(text) + count + 1)
    ids = [*text, int(rows.append(torch.tensor([text])).argmax())]
    for _ in range(count - 1):
        ids.append(int(rows.append(torch.tensor([ids[-1:]])).argmax()))
    return ids


def count_flips(model: Model, answers: list[list[int]], count: int) -> int:
    flips = 0
    for ids in answers:
        seen = PagedRows(model, 1, len(ids)).append(torch.tensor([ids[:-1]]), every=True)
        flips += int((seen.argmax(-1)[-count:] != torch.tensor(ids[-count:])).sum())
    return flips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    path = resolve_model(args.model).path
    if path is None:
        raise SystemExit("hashlm has one format")
    with torch.inference_mode():
        exact = load_model(args.model, LoadOptions("float32"))
        answers = [greedy(exact, text, args.tokens) for text in sample_texts(path, args.texts)]
        del exact
        for name, (dtype, formats) in CONTENDERS.items():
            flips = count_flips(load_model(args.model, LoadOptions(dtype, formats=formats)), answers, args.tokens)
            print(f"{name:>20}: {flips} of {args.texts * args.tokens} greedy tokens differ", flush=True)


if __name__ == "__main__":
    main()
