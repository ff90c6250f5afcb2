"""Which part of a hand-off's transfer is hidden behind the prefill: prompts of 2,000 tokens through real nodes, from
the record that the last chunk's end sends, at the decode node, until the row is in its batch.

    python -m benchmarks.layouts.layers [--json FILE] [--prompts N] [--transports shm,zmq,gloo]

    whole       one chunk, whole pages: nothing travels before all is computed
    layers      one chunk, in 6 parts
    chunks      the default chunks, whole pages: earlier chunks travel while later ones are computed
    both        the default chunks, in parts

Hidden is what `whole` takes longer, as a part of it. Two processes on the cores of this machine, no other load.
"""

from __future__ import annotations

import json
import random
import statistics
import time

import httpx

from benchmarks.cluster import baton_up
from benchmarks.report import parser_with_json
from tests.support.clusters.metrics_page import read_metrics, total

PROMPT_TOKENS = 2000
VOCAB = 40_000
NEEDED = 0.7
WAYS = {
    "whole": ("--chunk-size", "2048", "--layer-parts", "1"),
    "layers": ("--chunk-size", "2048", "--layer-parts", "6"),
    "chunks": (),
    "both": ("--layer-parts", "6"),
}


def post(port: int, prompt: list[int]) -> None:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 3, "temperature": 0}
    httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120).raise_for_status()


def handoff_totals(port: int) -> tuple[float, float]:
    """(hand-offs, seconds) so far."""
    values = read_metrics(f"http://127.0.0.1:{port}")
    return total(values, "baton_handoff_tail_seconds_count"), total(values, "baton_handoff_tail_seconds_sum")


def one_handoff(port: int, rng: random.Random) -> float:
    before = handoff_totals(port)
    post(port, [rng.randrange(100, VOCAB) for _ in range(PROMPT_TOKENS)])
    deadline = time.monotonic() + 20
    while (after := handoff_totals(port))[0] == before[0]:
        if time.monotonic() > deadline:
            raise RuntimeError("no hand-off was reported")
        time.sleep(0.1)
    return after[1] - before[1]


def measure(transport: str, prompts: int) -> dict[str, float]:
    """Median seconds of each way."""
    figures = {}
    for way, flags in WAYS.items():
        common = ("--model", "smollm2", "--transport", transport, "--heartbeat-s", "0.1", "--no-prefix-cache")
        with baton_up(*common, "--local-prefill-tokens", "0", *flags) as port:
            rng = random.Random(1)
            one_handoff(port, rng)  # the first one warms up
            figures[way] = statistics.median(one_handoff(port, rng) for _ in range(prompts))
    return figures


def main() -> int:
    parser = parser_with_json("How much of a hand-off hides behind the prefill")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--transports", default="shm,zmq,gloo")
    args = parser.parse_args()
    figures = {transport: measure(transport, args.prompts) for transport in args.transports.split(",")}
    for transport, row in figures.items():
        print(transport)
        for way, seconds in row.items():
            hidden = 1 - seconds / row["whole"]
            short = way in ("layers", "both") and hidden < NEEDED
            print(f"    {way:10} {1e3 * seconds:7.1f} ms   hidden {hidden:5.0%}{'  SHORT' if short else ''}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
