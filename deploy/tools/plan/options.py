"""The flags of `baton plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deploy.router_url import add_url
from deploy.tools.load import options as load_options
from shared.config.flags import add_flags
from shared.config.processes import NodeProcessConfig

DEFAULT_PROFILE = Path("baton-profile.json")
DESCRIPTION = """\
baton plan: is disaggregation worth it for your load, and with how many nodes of each kind? Measured here, simulated at
any size with the scheduler and the placement that serve.

  baton plan measure                                     this machine's nodes: a few minutes, nothing else may run
  baton plan find --rate 4 --prompt-tokens 600 --slo 'ttft<1s,itl<80ms'        on one such machine
  baton plan find --rate 400 --machines 200                                    on two hundred
  baton plan find --machines 200 --trace mooncake.jsonl                        a trace has times of its own
  baton plan find --rate 400 --fewest --slo 'ttft<1s,tpot<50ms'                how many does it take?
  baton plan find http://127.0.0.1:8000 --rate 4                               what to change in a running cluster

The load is described as for `baton load`, and judged as it judges; the answer names flags for `baton up`.
Exit status: 0 an answer ("does not meet" is one), 2 a flag or the profile makes no sense.
"""
FIND_EPILOG = """\
how long it takes
  3 to 4 ms of one core for each simulated request of 64 tokens, and some 30 simulations; of more than eight machines
  most simulate a few only, under their share of the load. --requests and --duration bound it.

how far to believe it
  Simulated are steps (as measured, by their shape), queues, chunks, mixed steps, memory, prefix caches, placement and
  hand-offs. Not simulated are failures, speculation, and links between machines: the hand-off is as fast as on the
  machine that was measured. A profile is of one model, one kind of machine and one number format.
"""
NODE_FLAGS_HIDDEN = frozenset(
    {"role", "node_id", "router", "bind_host", "bind_port", "transport", "heartbeat_s", "silence_s", "lease_s"}
    | {"drain_s", "max_message_bytes", "threads", "cpus", "borrow", "wait_policy", "keys", "log_level", "log_color"}
    | {"chunk_size", "mixed_chunk_size", "itl_budget", "prefix_cache", "served_model_name", "tp", "dp"}
    | {"offload_bytes", "offload_disk_bytes", "offload_dir"}
    | {"spec", "spec_width", "spec_topk", "spec_steps", "spec_copies", "spec_adaptive", "spec_head"}
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", metavar="WORD", title="words", required=True)
    measure = add_word(words, "measure", "profile the nodes of this machine")
    measure.add_argument("--out", type=Path, default=DEFAULT_PROFILE, help="(default: %(default)s)")
    measure.add_argument(
        "--cores-per-node",
        default="",
        metavar="LIST",
        help="numbers of cores that a node may have, as 4,2 (default: all cores, and half of them)",
    )
    add_flags(measure, NodeProcessConfig, NODE_FLAGS_HIDDEN)
    find = add_word(words, "find", "which layout meets an SLO under a load")
    find.epilog = FIND_EPILOG
    add_url(find, "default: no cluster is asked; with one: what would have to change there")
    find.add_argument("--api-key-file", type=Path, metavar="FILE", help="key of that cluster's router, if it has one")
    add_find(find.add_argument_group("plan"))
    load_options.add_load(find.add_argument_group("load"))
    load_options.add_prompts(find.add_argument_group("what is asked"))


def add_word(words: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = words.add_parser(
        name,
        help=text,
        description=f"baton plan {name}: {text}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def add_find(group: Any) -> None:
    group.add_argument("--profile", type=Path, default=DEFAULT_PROFILE, metavar="FILE", help="(default: %(default)s)")
    group.add_argument(
        "--slo",
        default="ttft<2s,tpot<100ms",
        help="bounds on ttft, tpot, itl (longest wait), e2e (default: %(default)s)",
    )
    load_options.number(group, "--slo-share", 0.9, "X", "share of requests within the SLO that is good enough")
    group.add_argument("--machines", type=int, default=1, metavar="N", help="like the measured one (default: 1)")
    group.add_argument("--fewest", action="store_true", help="find the smallest --machines that meets the SLO")
    group.add_argument("--most-machines", type=int, default=512, metavar="N", help="where --fewest gives up (512)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all forecasts there")
