"""The flags of `baton plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deploy.cluster.admin import add_router
from deploy.router_url import add_url
from deploy.tools.traffic import options as load_options
from shared.config.flags import add_flags
from shared.config.processes import NodeProcessConfig

DEFAULT_PROFILE = Path("baton-profile.json")
DESCRIPTION = """\
baton plan: does disaggregation pay for your load, and with how many nodes of each kind? It measures here, and simulates
any size with the scheduler and the placement of the product.

  baton plan measure                                     profile this machine's nodes: takes minutes; run nothing else
  baton plan find --rate 4 --prompt-tokens 600 --slo 'ttft<1s,itl<80ms'        on one such machine
  baton plan find --rate 400 --machines 200                                    on two hundred
  baton plan find --machines 200 --trace mooncake.jsonl                        a trace has its own times
  baton plan find --rate 400 --fewest --slo 'ttft<1s,tpot<50ms'                how many machines are needed?
  baton plan find http://127.0.0.1:8000 --rate 4                               what to change in a running cluster
  baton plan act http://127.0.0.1:8000 --slo 'tpot<50ms'                       change roles there as the load changes

The load is described and judged as in `baton load`. The answer names flags for `baton up`.
Exit status: 0 an answer ("does not meet" is one), 2 a flag or the profile is invalid.
"""
FIND_EPILOG = """\
how long it takes
  3 to 4 ms of one core per simulated request of 64 tokens, in about 30 simulations. For more than eight machines,
  most simulations cover only a few machines, under their share of the load. --requests and --duration bound the time.

what it covers
  It simulates steps (as measured, by their shape), queues, chunks, mixed steps, memory, prefix caches, placement and
  hand-offs. It does not simulate failures, speculation, and links between machines: hand-offs are as fast as on the
  measured machine. A profile is for one model, one kind of machine and one number format.
"""
ACT_EPILOG = """\
how it decides
  Every --period it asks the router for arrivals and token times, and computes how many nodes of each role the
  work would fill. If a role is full over a whole --window, and another split leaves the fuller role at least 15 %
  less full, nodes change: they finish or hand over their requests and return in the other role, as with
  `baton admin role`. No stream breaks. A role never has fewer than --least nodes.

  With --ray it also decides the number of nodes, within [scaling] of that file: one more when no split of the present
  nodes is enough, one less when the others have room. Meanwhile the cluster's own rules do not apply.

  It stores nothing, so you can restart it at any time. Without it the nodes keep their roles.
"""
NODE_FLAGS_HIDDEN = frozenset(
    {"role", "node_id", "router", "routers_file", "bind_host", "bind_port", "transport", "heartbeat_s", "silence_s"}
    | {"ready_port", "lease_s", "lora_dir", "lora_slots", "kv_events_endpoint", "kv_events_topic"}
    | {"drain_s", "threads", "cpus", "borrow", "wait_policy", "keys", "log_level", "log_format"}
    | {"chunk_size", "mixed_chunk_size", "itl_budget", "prefix_cache", "served_model_name", "tp", "dp"}
    | {"offload_bytes", "offload_disk_bytes", "offload_dir"}
    | {"device", "gpu_mem_fraction", "cuda_graphs", "deterministic", "attention"}  # nodes are measured on CPU cores
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
        help="numbers of cores per node, such as 4,2 (default: all cores, and half of them)",
    )
    add_flags(measure, NodeProcessConfig, NODE_FLAGS_HIDDEN)
    find = add_word(words, "find", "find a layout that meets an SLO under a load")
    find.epilog = FIND_EPILOG
    add_url(find, "default: no cluster; with one: what to change there")
    find.add_argument("--api-key-file", type=Path, metavar="FILE", help="key of that cluster's router, if it needs one")
    find.add_argument("--ca", type=Path, metavar="FILE", help="CA of the server's certificate, if not a public CA")
    add_find(find.add_argument_group("plan"))
    load_options.add_load(find.add_argument_group("load"))
    load_options.add_prompts(find.add_argument_group("prompts"))
    act = add_word(words, "act", "change roles of a running cluster's nodes as the load changes")
    act.epilog = ACT_EPILOG
    add_url(act)
    add_router(act)
    add_act(act)


def add_word(words: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = words.add_parser(
        name,
        help=text,
        description=f"baton plan {name}: {text}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def add_act(group: Any) -> None:
    group.add_argument("--slo", default="tpot<100ms", help="bound on tpot, as for baton load (default: %(default)s)")
    load_options.number(group, "--window", 15.0, "S", "a role must be full for this long")
    load_options.number(group, "--period", 2.0, "S", "time between two looks")
    group.add_argument("--least", type=int, default=1, metavar="N", help="minimum of nodes per role (default: 1)")
    group.add_argument(
        "--ray",
        type=Path,
        metavar="FILE",
        help="settings file of a cluster on Ray; then the plan also adds and removes that cluster's nodes",
    )
    group.add_argument("--dry-run", action="store_true", help="only report moves")


def add_find(group: Any) -> None:
    group.add_argument("--profile", type=Path, default=DEFAULT_PROFILE, metavar="FILE", help="(default: %(default)s)")
    group.add_argument(
        "--slo",
        default="ttft<2s,tpot<100ms",
        help="bounds on ttft, tpot, itl (longest wait), e2e (default: %(default)s)",
    )
    load_options.number(group, "--slo-share", 0.9, "X", "required share of requests within the SLO")
    group.add_argument(
        "--machines", type=int, default=1, metavar="N", help="machines like the measured one (default: 1)"
    )
    group.add_argument("--fewest", action="store_true", help="find the smallest --machines that meets the SLO")
    group.add_argument("--most-machines", type=int, default=512, metavar="N", help="limit of --fewest (default: 512)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all forecasts to FILE")
