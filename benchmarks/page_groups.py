"""KV bytes of one running row, and of its hand-off, with page groups and with one page list for all layers.

    python -m benchmarks.page_groups [--tokens 32768] [--families gemma3_text,gpt_oss] [--json FILE]

Each family is a random folder with the published order of layers and windows, but few of them, and narrow ones:

    gemma3_text    one layer of six reads all tokens, the others 512
    gpt_oss        every other layer reads all tokens, the others 128

A prefill and a decode node serve it. The same folder with all layers reading everything keeps what one page list for
all layers keeps, because that list must keep what its widest layer reads. Pages and bytes are those that /metrics
tells while the one row runs; a page's size is the one that nodes compute. `prefill`: pages of the row when its prompt
begins (all are reserved), and the fewest before its hand-off.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cluster import baton_up
from benchmarks.report import report
from shared.kv.layout import page_bytes
from tests.support.library_families import VOCAB, load, save, write_tokenizer
from tests.support.metrics_page import Metrics, read_metrics

PAGE_SIZE = 16
ANSWER = 96  # tokens before the row has its full length, and as many after
POLL_S = 0.1
THIN = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SLIDING, WHOLE = "sliding_attention", "full_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 512, "layer_types": [SLIDING] * 5 + [WHOLE]},
    "gpt_oss": {"sliding_window": 128, "layer_types": [SLIDING, WHOLE] * 2},
}
MOST_KEPT = {"gemma3_text": 0.25, "gpt_oss": 0.55}


@dataclass(slots=True)
class Seen:
    """What /metrics told, in its order, while the row ran."""

    prefill: list[int] = field(default_factory=list)  # active pages, until the hand-off
    decode: list[int] = field(default_factory=list)
    handoff_bytes: int = 0

    def read(self, values: Metrics) -> None:
        active = active_pages(values)
        self.handoff_bytes = int(sum(v for (name, _), v in values.items() if name == "baton_handoff_bytes_total"))
        if active["decode"]:
            self.decode.append(active["decode"])
        elif active["prefill"]:
            self.prefill.append(active["prefill"])


def active_pages(values: Metrics) -> dict[str, int]:
    """Return the active pages of each role that the router knows."""
    gauges = {labels: value for (name, labels), value in values.items() if name == "baton_kv_pages"}
    return {
        role: int(value)
        for role in ("prefill", "decode")
        for labels, value in gauges.items()
        if f'role="{role}"' in labels and 'state="active"' in labels
    }


def serve_one(folder: Path, num_tokens: int) -> Seen:
    """Serve one request whose row grows to `num_tokens` tokens and a few more, alone."""
    flags = ("--model", str(folder), "--dtype", "bfloat16", "--page-size", str(PAGE_SIZE), "--heartbeat-s", "0.1")
    rng, seen = random.Random(5), Seen()
    body = {
        "model": folder.name,
        "prompt": [rng.randrange(3, VOCAB) for _ in range(num_tokens - ANSWER)],
        "max_tokens": 2 * ANSWER,
        "ignore_eos": True,
        "temperature": 0,
    }
    with baton_up(*flags, "--kv-bytes", "64MiB", "--local-prefill-tokens", "0") as port:
        url = f"http://127.0.0.1:{port}"
        while len(active_pages(read_metrics(url))) < 2:  # ready is a cluster with one node that serves alone
            time.sleep(POLL_S)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=None)
            while not asked.done():
                seen.read(read_metrics(url))
                time.sleep(POLL_S)
        answer = asked.result().raise_for_status().json()
        time.sleep(1.0)  # the last heartbeats
        seen.read(read_metrics(url))
    if answer["usage"]["completion_tokens"] != body["max_tokens"] or not seen.decode:
        raise RuntimeError(f"{answer['usage']}, or no row was seen")
    return seen


def measure(family: str, num_tokens: int, folder: Path, shape: dict[str, Any]) -> dict[str, float]:
    sizes = {"num_hidden_layers": len(shape["layer_types"]), "max_position_embeddings": num_tokens + 4 * ANSWER}
    save(family, folder, **THIN, **shape, **sizes)
    write_tokenizer(folder)
    size = page_bytes(load(folder, "bfloat16").kv_planes(PAGE_SIZE))
    seen = serve_one(folder, num_tokens)
    return {
        "page_bytes": size,
        "decode_pages": max(seen.decode),
        "decode_bytes": max(seen.decode) * size,
        "handoff_bytes": seen.handoff_bytes,
        "prefill_most_bytes": max(seen.prefill) * size,
        "prefill_least_bytes": seen.prefill[-1] * size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--families", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for family in args.families.split(","):
        shape = SHAPES[family]
        one_list = {"layer_types": [WHOLE] * len(shape["layer_types"])}
        with tempfile.TemporaryDirectory() as place:
            groups = measure(family, args.tokens, Path(place) / "groups", shape)
            one = measure(family, args.tokens, Path(place) / "one", shape | one_list)
        kept = {name: round(groups[name] / one[name], 3) for name in ("decode_bytes", "handoff_bytes")}
        figures[family] = {"groups": groups, "one list": one, "kept": kept, "most": MOST_KEPT[family]}
    report(figures, args.json)
    return int(any(max(found["kept"].values()) > found["most"] for found in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
