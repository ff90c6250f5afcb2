"""NVIDIA's aiperf: a short profile of synthetic prompts with streaming, on chat and on completions."""

from __future__ import annotations

import json
from typing import Any

from tally import Tally, from_arguments, own_tool

NUM_REQUESTS, NUM_TOKENS = 6, 12


def main(tally: Tally) -> None:
    for endpoint in ("chat", "completions"):
        with tally.check(f"{endpoint}, streaming"):
            report = profile(tally, endpoint)
            assert not report["error_summary"], report["error_summary"]
            assert report["request_count"]["avg"] == NUM_REQUESTS
            assert report["time_to_first_token"]["count"] == NUM_REQUESTS
            assert report["output_sequence_length"]["avg"] == NUM_TOKENS


def profile(tally: Tally, endpoint: str) -> dict[str, Any]:
    """Return aiperf's own report."""
    out = tally.folder / endpoint
    flags = {
        "--model": tally.model,
        "--url": tally.url,
        "--tokenizer": str(tally.tokenizer),
        "--endpoint-type": endpoint,
        "--request-count": str(NUM_REQUESTS),
        "--concurrency": "2",
        "--isl": "48",
        "--osl": str(NUM_TOKENS),
        "--extra-inputs": json.dumps({"ignore_eos": True, "temperature": 0}),
        "--ui": "none",
        "--output-artifact-dir": str(out),
    }
    arguments = [word for pair in flags.items() for word in pair]
    tally.run(own_tool("aiperf"), "profile", "--streaming", "--use-server-token-count", "--no-auto-plot", *arguments)
    report: dict[str, Any] = json.loads((out / "profile_export_aiperf.json").read_text())
    return report


if __name__ == "__main__":
    main(from_arguments())
