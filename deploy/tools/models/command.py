"""The arguments of `baton models`, and what it prints."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from shared.config.settings.settings import ModelConfig

if TYPE_CHECKING:
    from deploy.tools.models.look import Outlook

GIB = 1 << 30
DESCRIPTION = """\
baton models: what a model would do here, before its weights are fetched.

  baton models                     the shipped model, and what is in the cache of the hub
  baton models org/name            a model of the hub; folders and files are named as for `baton up`
  baton models NAME NAME --json    for programs: one JSON object in a line for each model

Tells the family, the program that runs it, the numbers' format, the memory for weights and for a token of KV, the
context, and how it calls tools and thinks; or the sentence with which `baton up` would refuse it. Of a hub's model it
fetches the small JSON files and templates, and the headers of the weight files. Memory is a GPU's where there is one.

Exit status: 0, or 1 when a model that was named would be refused, 2 when a flag makes no sense.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="NAME", help="as for --model of `baton up`")
    parser.add_argument("--offline", action="store_true", help="ask no hub: only its cache")
    parser.add_argument(
        "--model-library",
        choices=("auto", "baton", "transformers"),
        default=ModelConfig().model_library,
        help="as for `baton up` (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in a line for each model")


def run(args: argparse.Namespace) -> int:
    from deploy.tools.models.look import listed, look_at  # loads torch

    if not args.models:
        for name, num_bytes in listed():
            print(json.dumps({"model": name, "bytes": num_bytes}) if args.json else f"{in_gib(num_bytes)}  {name}")
        return 0
    is_refused = False
    for name in args.models:
        outlook = look_at(name, args.offline, args.model_library)
        is_refused |= bool(outlook.refusal)
        print(json.dumps(asdict(outlook)) if args.json else "\n".join(lines(outlook)), flush=True)
    return int(is_refused)


def lines(outlook: Outlook) -> list[str]:
    """Return the lines about one model: its name, and what was found out."""
    free = outlook.free_bytes - outlook.weights_bytes
    room = max(0, free) // outlook.kv_token_bytes if outlook.kv_token_bytes else 0
    weights = f"{in_gib(outlook.weights_bytes)}" + f", of {in_gib(outlook.free_bytes)} free" * bool(outlook.free_bytes)
    rows = {
        "refused": outlook.refusal,
        "family": outlook.family,
        "run by": outlook.program,
        "format": outlook.stored,
        "weights": weights if outlook.weights_bytes else "",
        "KV": f"{outlook.kv_token_bytes:,} bytes a token; room for {room:,}" if outlook.kv_token_bytes else "",
        "context": f"{outlook.context:,} tokens" if outlook.context else "",
        "calls": outlook.calls,
        "thoughts": outlook.thoughts,
    }
    return [outlook.model, *(f"  {what:9} {said}" for what, said in rows.items() if said)]


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
