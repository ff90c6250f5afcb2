"""`baton generate` beside `baton load`: the same prompts, as many at a time, on one cluster; output tokens per second.

    python -m tests.bench.generate [--model smollm2] [--lines 64] [--concurrency 8] [--tokens 48] [--rounds 3]

They take turns, each with prompts of its own, so that no prefix is cached. `baton load` reads streams, `baton generate`
whole answers. Their windows are from the first request to the last answer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

from deploy.cluster.own_cluster import own_cluster
from deploy.tools.plan.router_load import put_load
from shared.core import launcher
from shared.core.sampling_params import NEUTRAL

TEXT = "the keeper of the northern tower wrote one line a day into a book that nobody was meant to read"


def prompts(who: str, number: int, args: argparse.Namespace) -> list[str]:
    return [f"{who} {number} {line} {TEXT}" for line in range(args.lines)]


def by_load(url: str, folder: Path, number: int, args: argparse.Namespace) -> float:
    file = folder / "prompts.txt"
    file.write_text("\n".join(prompts("load", number, args)))
    flags = ["--concurrency", str(args.concurrency), "--requests", str(args.lines), "--duration", "3600"]
    outcome = put_load(url, [*flags, "--prompts", str(file), "--output-tokens", str(args.tokens)], api="completions")
    whole = [record for record in outcome.records if record.is_whole]
    assert len(whole) == args.lines
    return args.lines * args.tokens / max(record.end for record in whole)


def by_generate(url: str, folder: Path, number: int, args: argparse.Namespace) -> float:
    file = folder / f"requests-{number}.jsonl"
    fixed = {"model": "bench", "max_tokens": args.tokens, "ignore_eos": True, **asdict(NEUTRAL), "temperature": 0}
    head = {"method": "POST", "url": "/v1/completions"}
    lines = enumerate(prompts("generate", number, args))
    file.write_text("".join(json.dumps(head | {"custom_id": str(i), "body": fixed | {"prompt": one}}) + "\n"
                            for i, one in lines))  # fmt: skip
    command = launcher.command("deploy.cli", "generate", str(file), url, "--concurrency", str(args.concurrency))
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(said.rsplit(", ", 1)[1].split()[0].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    for flag, default in (("--lines", 64), ("--concurrency", 8), ("--tokens", 48), ("--rounds", 3)):
        parser.add_argument(flag, type=int, default=default)
    args = parser.parse_args()
    flags = ("--model", args.model, "--served-model-name", "bench")
    with tempfile.TemporaryDirectory() as name, own_cluster(flags, Path(name) / "up.log") as url:
        folder = Path(name)
        for number in range(args.rounds):
            load, generate = by_load(url, folder, number, args), by_generate(url, folder, number, args)
            print(
                f"round {number}: load {load:,.0f}, generate {generate:,.0f} tokens/s ({generate / load:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
