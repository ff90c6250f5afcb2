"""guidellm: a sweep of three with synthetic prompts, as its README writes it; what it sends is its own choice.

By default it asks /v1/chat/completions for a stream with `continuous_usage_stats`. It reads the counts of every chunk.
"""

from __future__ import annotations

import json
import os
from typing import Any

from tally import Tally, from_arguments, own_tool

NUM_REQUESTS, NUM_TOKENS = 3, 12
ENDPOINTS = {"default": "", "completions": ",request_format=/v1/completions"}
ONE_WORKER = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}  # each loads torch, for every strategy anew


def main(tally: Tally) -> None:
    for name, profile in (("default", "sweep,sweep_size=3"), ("completions", "synchronous")):
        with tally.check(f"{name}, {profile.partition(',')[0]}"):
            check_report(run(tally, ENDPOINTS[name], profile))


def run(tally: Tally, endpoint: str, profile: str) -> dict[str, Any]:
    """Return guidellm's own report."""
    flags = {
        "--backend": f"kind=openai_http,target={tally.url}{endpoint}",
        "--profile": f"kind={profile}",
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--data": f"kind=synthetic_text,prompt_tokens=48,output_tokens={NUM_TOKENS}",
        "--tokenizer": f"kind=hf_auto,model={tally.tokenizer}",
        "--output": "kind=json,path=benchmarks.json",
    }
    arguments = [word for pair in flags.items() for word in pair]
    tally.run(own_tool("guidellm"), "run", "--disable-progress", *arguments, env={**os.environ, **ONE_WORKER})
    report: dict[str, Any] = json.loads((tally.folder / "benchmarks.json").read_text())
    return report


def check_report(report: dict[str, Any]) -> None:
    assert report["benchmarks"], "no benchmark in the report"
    for benchmark in report["benchmarks"]:
        requests = benchmark["requests"]
        assert not requests["errored"], requests["errored"][0]["info"]["error"]
        assert requests["successful"], "no request succeeded"
        assert {one["output_tokens"] for one in requests["successful"]} == {NUM_TOKENS}


if __name__ == "__main__":
    main(from_arguments())
