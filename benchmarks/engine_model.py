"""The real model beside transformers: same weights, dtype, threads, sdpa, inference_mode, warm. Prints tokens/s.

    python -m benchmarks.engine_model [--model smollm2] [--dtype bfloat16] [--threads 2] [--json out.json]

Times a forward and an argmax at engine level (no scheduler, no sampling, no HTTP): prefill of one 512-token prompt,
decode at batch 1, 8, 32 from 128 tokens of context on. The two sides take turns, so that a busy machine hurts both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.report import parser_with_json
from shared.config.models.model_path import resolve_model
from shared.kernel.code.step_layout import Layout
from shared.kv.pool import KVPool
from shared.model.formats.opened import DTYPES, LoadOptions, open_model
from shared.model.loading.load import load_model
from shared.model.math.interface import Model, ModelInputs
from tests.support.models.transformers_model import reference_network

PAGE_SIZE = 16
CONTEXT = 128
BATCHES = (1, 8, 32)


class PagedRows:
    """B sequences of the same length over our paged model."""

    def __init__(self, model: Model, num_rows: int, max_len: int) -> None:
        self.model = model
        per_row = -(-max_len // PAGE_SIZE)
        self.pool = KVPool(model.kv_planes(PAGE_SIZE), 1 + num_rows * per_row, PAGE_SIZE)
        self.table = torch.arange(1, 1 + num_rows * per_row, dtype=torch.int32).view(num_rows, per_row)
        self.length = 0

    def append(self, ids: torch.Tensor, every: bool = False) -> torch.Tensor:
        """ids (B, n); logits of the last token of each row (B, vocab), or of all (B * n, vocab)."""
        num_rows, count = ids.shape
        positions = torch.arange(self.length, self.length + count).repeat(num_rows)
        self.length += count
        last = torch.arange(1, num_rows + 1) * count - 1
        inputs = ModelInputs(
            input_ids=ids.reshape(-1),
            positions=positions,
            layout=Layout(
                cu_q_lens=torch.arange(0, num_rows * count + 1, count, dtype=torch.int32),
                page_tables=(self.table[:num_rows],),
                max_q_len=count,
                max_seq_len=self.length,
            ),
            logits_idx=torch.arange(num_rows * count) if every else last,
        )
        return self.model.forward(inputs, self.pool).logits


class ReferenceRows:
    """B sequences over transformers with its own cache."""

    def __init__(self, network: transformers.PreTrainedModel) -> None:
        self.network = network
        self.cache = transformers.DynamicCache(config=network.config)

    def append(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.network(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]


@dataclass(frozen=True)
class Sides:
    model: Model
    network: transformers.PreTrainedModel

    def ours(self, num_rows: int, max_len: int) -> PagedRows:
        return PagedRows(self.model, num_rows, max_len)

    def theirs(self) -> ReferenceRows:
        return ReferenceRows(self.network)


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def prompt_ids(num_rows: int, length: int, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (num_rows, length), generator=torch.Generator().manual_seed(5))


def bench_prefill(sides: Sides, length: int, rounds: int) -> dict[str, float]:
    ids = prompt_ids(1, length, sides.model.spec.vocab_size)
    ours, theirs = [], []
    for _ in range(rounds + 1):
        fresh, cache = sides.ours(1, length), sides.theirs()
        ours.append(seconds(lambda rows=fresh: rows.append(ids)))
        theirs.append(seconds(lambda rows=cache: rows.append(ids)))
    return {"ours": length / statistics.median(ours[1:]), "transformers": length / statistics.median(theirs[1:])}


def bench_decode(sides: Sides, num_rows: int, steps: int) -> dict[str, float]:
    ids = prompt_ids(num_rows, CONTEXT, sides.model.spec.vocab_size)
    ours, theirs = sides.ours(num_rows, CONTEXT + steps + 2), sides.theirs()
    times: tuple[list[float], list[float]] = ([], [])
    state = [ours.append(ids).argmax(-1), theirs.append(ids).argmax(-1)]
    sides_in_turn = (ours, theirs)
    for step in range(steps + 2):
        for side in (0, 1):
            start = time.perf_counter()
            state[side] = sides_in_turn[side].append(state[side][:, None]).argmax(-1)
            if step >= 2:
                times[side].append(time.perf_counter() - start)
    rates = [num_rows / statistics.median(side) for side in times]
    return {"ours": rates[0], "transformers": rates[1]}


def flip_rate(name: str, threads: int, texts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Greedy text in float32; how often bfloat16, reading the same text, would have chosen another token."""
    exact, rough = (load_model(name, LoadOptions(dtype, threads=threads)) for dtype in ("float32", "bfloat16"))
    flips = total = 0
    for text in texts:
        rows = PagedRows(exact, 1, len(text) + new_tokens + 1)
        ids = [*text, int(rows.append(torch.tensor([text])).argmax())]
        for _ in range(new_tokens - 1):
            ids.append(int(rows.append(torch.tensor([ids[-1:]])).argmax()))
        seen = PagedRows(rough, 1, len(ids)).append(torch.tensor([ids[:-1]]), every=True)
        chosen = seen.argmax(-1)[len(text) - 1 :]
        flips += int((chosen != torch.tensor(ids[len(text) :])).sum())
        total += new_tokens
    return {"flips": flips, "tokens": total, "rate": flips / total}


def sample_texts(source_path: Path, count: int) -> list[list[int]]:
    """A few plain questions in the model's own tokens."""
    where = {"gguf_file": source_path.name} if source_path.is_file() else {}
    folder = source_path.parent if source_path.is_file() else source_path
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **where)
    topics = ("the tide", "a relay race", "sourdough bread", "the number pi", "a lighthouse", "compound interest")
    asks = ("Explain {} to a child.", "Write a short story about {}.", "List five facts about {}.")
    questions = [ask.format(topic) for topic in topics for ask in asks][:count]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in questions
    ]


def parse_args() -> argparse.Namespace:
    parser = parser_with_json(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--flip-tokens", type=int, default=64, help="per text; 0: leave it out")
    parser.add_argument("--flip-texts", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    path = resolve_model(args.model).path
    if path is None:
        raise SystemExit("hashlm has no peer to compare with")
    with torch.inference_mode():
        source = open_model(path)
        sides = Sides(
            load_model(args.model, LoadOptions(args.dtype, threads=args.threads)),
            reference_network(source, DTYPES[args.dtype]),
        )
        rows: dict[str, dict[str, float]] = {}
        rows[f"prefill {args.prompt}"] = bench_prefill(sides, args.prompt, args.rounds)
        report(f"prefill {args.prompt}", rows[f"prefill {args.prompt}"])
        for batch in BATCHES:
            rows[f"decode {batch}"] = bench_decode(sides, batch, args.steps)
            report(f"decode {batch}", rows[f"decode {batch}"])
        if args.flip_tokens:
            texts = sample_texts(path, args.flip_texts)
            rows["flips"] = flip_rate(args.model, args.threads, texts, args.flip_tokens)
            print(f"bfloat16 greedy flips against float32: {rows['flips']['rate']:.2%} of {rows['flips']['tokens']}")
    if args.json:
        setup = {"model": args.model, "dtype": args.dtype, "threads": args.threads, "torch": torch.__version__}
        args.json.write_text(json.dumps({"setup": setup, "tokens_per_s": rows}, indent=2) + "\n")


def report(name: str, row: dict[str, float]) -> None:
    ratio = row["ours"] / row["transformers"]
    print(f"{name:>12}: {row['ours']:8.1f} tok/s   transformers {row['transformers']:8.1f}   x{ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
