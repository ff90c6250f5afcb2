"""Hand-offs of one row, by this checkout and by another one: say the last one without page groups.

    git worktree add ../old d52353da; python -m benchmarks.layouts.page_groups ../old [--rounds 3] [--transport shm]
        [--tokens 32768] [--families gemma3_text,gpt_oss,deepseek_v3] [--json FILE]

Both have a prefill and a decode node, and serve one row of the same random folder in turns. Its keys and values have
published sizes, everything else is narrow:

    gemma3_text    6 of Gemma 3 270M's 18 layers: one reads all tokens, 5 have a window of 512
    gpt_oss        2 of gpt-oss 20b's 24 layers: one reads all tokens, one has a window of 128
    deepseek_v3    2 of DeepSeek-V3's 61 layers, at most 2,048 tokens

The first turn touches the memory; the median is of the others. Figures are from /metrics. `handoff_s`: from the end of
the prompt's last chunk to its installation. `bytes_per_token`: of the hand-off, for each token of the prompt.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cluster import ROOT, baton_up
from benchmarks.report import parser_with_json, report
from tests.support.clusters.metrics_page import Metrics, read_metrics, total
from tests.support.models.library_families import VOCAB, save, write_tokenizer

POOL_BYTES = 1 << 30
ANSWER = 64  # tokens
POLL_S = 0.2
NEWS_S = 2.0  # twenty heartbeats
FLAGS = ["--dtype", "bfloat16", "--heartbeat-s", "0.1", "--no-prefix-cache", "--local-prefill-tokens", "0"]
THIN = {"hidden_size": 32, "intermediate_size": 32}
SLIDING, WHOLE = "sliding_attention", "full_attention"


def layers(kinds: list[str], window: int, heads: int, head_dim: int) -> dict[str, Any]:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}
    return {"num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": window, **sizes}


FOLDERS: dict[str, dict[str, Any]] = {
    "gemma3_text": layers([SLIDING] * 5 + [WHOLE], window=512, heads=1, head_dim=256),
    "gpt_oss": layers([SLIDING, WHOLE], window=128, heads=8, head_dim=64),
    "deepseek_v3": {
        "num_hidden_layers": 2,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
MOST_TOKENS = {"deepseek_v3": 2048}


@dataclass(frozen=True, slots=True)
class HandedOver:
    text: str
    num_bytes: float
    handoff_s: float


def handoffs(values: Metrics) -> list[float]:
    """Return (number, seconds, bytes)."""
    return [total(values, f"baton_handoff_{name}") for name in ("seconds_count", "seconds_sum", "bytes_total")]


def serve(url: str, body: dict[str, Any]) -> HandedOver:
    """Let a cluster that does nothing else answer one request."""
    before = handoffs(read_metrics(url))
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=None).raise_for_status().json()
    time.sleep(NEWS_S)
    num, seconds, num_bytes = (late - early for late, early in zip(handoffs(read_metrics(url)), before, strict=True))
    if (num, answer["usage"]["completion_tokens"]) != (1, ANSWER):
        raise RuntimeError(f"{num:g} hand-offs, {answer['usage']}")
    return HandedOver(answer["choices"][0]["text"], num_bytes, seconds)


@contextmanager
def cluster(folder: Path, transport: str, code: Path) -> Iterator[str]:
    """Yield its URL, once both nodes are known."""
    sizes = ("--model", str(folder), "--kv-bytes", str(POOL_BYTES), "--transport", transport)
    with baton_up(*sizes, *FLAGS, code=code) as port:
        url = f"http://127.0.0.1:{port}"
        while not all(total(read_metrics(url), "baton_kv_pages", f'role="{role}"') for role in ("prefill", "decode")):
            time.sleep(POLL_S)  # ready is a cluster with one node that serves alone
        yield url


def compare(family: str, num_tokens: int, rounds: int, transport: str, other: Path) -> dict[str, Any]:
    rng = random.Random(5)
    prompt = [rng.randrange(3, VOCAB) for _ in range(num_tokens - ANSWER)]
    body = {"model": family, "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0}
    found: dict[str, list[HandedOver]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place) / family
        save(family, folder, **THIN, **FOLDERS[family], max_position_embeddings=num_tokens)
        write_tokenizer(folder)
        urls = [stack.enter_context(cluster(folder, transport, code)) for code in (other, ROOT)]
        for _ in range(1 + rounds):
            for rows, url in zip(found.values(), urls, strict=True):
                rows.append(serve(url, body))
    equal = len({one.text for rows in found.values() for one in rows}) == 1
    return {"tokens": num_tokens, "equal_answers": equal} | {
        name: {
            "bytes_per_token": round(max(one.num_bytes for one in rows) / len(prompt)),
            "handoff_bytes": max(one.num_bytes for one in rows),
            "handoff_s": [round(one.handoff_s, 4) for one in rows],
            "handoff_median_s": round(statistics.median(one.handoff_s for one in rows[1:]), 4),
        }
        for name, rows in found.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("other", type=Path, help="the other checkout; it runs in this environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--families", default=",".join(FOLDERS))
    parser.add_argument("--transport", default="shm")
    args = parser.parse_args(argv)
    figures = {}
    for family in args.families.split(","):
        num_tokens = min(args.tokens, MOST_TOKENS.get(family, args.tokens))
        figures[family] = compare(family, num_tokens, args.rounds, args.transport, args.other.resolve())
    report(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
