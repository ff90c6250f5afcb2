"""The flags of `baton load`, in groups."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.router_url import DEFAULT_URL, add_url_flag
from deploy.tools.traffic.workloads.arrivals import SHAPES
from deploy.tools.traffic.workloads.lengths import FORMS, PAUSE_FORMS

DESCRIPTION = """\
baton load: put load on a server with OpenAI's API, measure what its users would see, and check the answers and figures.

  baton load                                  60 s of 2 requests a second at http://127.0.0.1:8000
  baton load URL URL                          routers over the same nodes, in turn
  baton load URL --rate 8 --arrivals gamma:3  bursts; no user waits for another's answer (an open loop)
  baton load URL --concurrency 16             16 users, each waits for its answer and asks again (a closed loop)
  baton load URL --turns 4 --think 5 --prefix-tokens 500      conversations with a shared prefix
  baton load URL --agents 20                  20 agents: long histories, pauses for tools, several requests at once
  baton load URL --trace mooncake.jsonl       replay a recorded load with its times, lengths and shared prefixes
  baton load URL --sweep --slo 'ttft<1s,tpot<50ms'            the highest rate within the SLO
  baton load URL --hang-up 0.3 --drill kill:decode-1@20       clients leave, a node dies: are all others answered?
  baton load URL --out before                 also before/report.html, report.json, requests.csv
  baton load compare before after             two runs compared, with intervals

Ctrl-C ends a run early and shows the results so far.
Exit status: 0 all checks passed, 1 a check failed, 2 a flag or the server is invalid.
"""
EPILOG = """\
agents
  Each of the N agents declares a tool, sends a system prompt and a task, and must call the tool (tool_choice
  "required"). It returns after 0.5 to 30 s with its whole history (with the server's answers) and the tool's result,
  made up by --seed. In its last turn it may answer without a call. In one of nine turns it sends four requests with one
  history at once, and goes on with the first one's call when all are answered. All N begin together, and one that is
  done is replaced. Fit this to your agents with --turns, --think, --prompt-tokens (of a task or a tool's result),
  --output-tokens (of answers without a call), --prefix-tokens and --fan-out. For a server without tools:
  --api completions, or --extra-body '{"tools": null}'.

  The report shows TTFT by turn, and the share of prompt tokens that the server computed because no cache had them.
  To see what a policy or version gains, run the same command against both, with --out A and --out B, then
  baton load compare A B.

what the figures mean
  ttft    from sending a request (a new connection included) to its first token
  itl     the wait for one token after the first; tokens of one chunk share the wait
  tpot    the mean of these waits over one answer
  e2e     from sending a request to the end of its answer
  goodput requests within the SLO per second; "smooth goodput" (arXiv:2410.14257) counts tokens minus the
          tokens that readers could have read while idle, so that neither dropping late requests nor holding tokens
          back improves it
  [a, b]  95 % interval, by a bootstrap over blocks of neighbouring requests (for rates: of neighbouring seconds)

truth checks, at the end of every run
  tokens     some prompts are sent before the load, one by one, and again during it: greedy answers must be equal
  stalls     no stream stood still
  leaks      all KV pages and rows are free after the load                        (only with a Baton router)
  agreement  server and client measured the same latencies                        (only with a Baton router)
  client     how late this program was: above 20 ms you measure it, not the server
"""


@dataclass(frozen=True, slots=True)
class Usual:
    """Defaults that depend on --agents."""

    prompt_tokens: str = "128"
    output_tokens: str = "64"
    turns: str = "1"
    think: str = "0"
    fan_out: str = "1"
    prefix_tokens: int = 0
    prefix_groups: int = 1


PLAIN = Usual()
AGENTS = Usual(
    prompt_tokens="mix:30=5,200=3,800=1",
    output_tokens="20-120",
    turns="2-12",
    think="0.5-30",
    fan_out="mix:1=8,4=1",
    prefix_tokens=1000,
    prefix_groups=2,
)
DURATION_S, AGENTS_DURATION_S = 60.0, 180.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "words", nargs="*", metavar="URL", help=f"a server, or routers (default: {DEFAULT_URL}); or: compare A B"
    )
    add_url_flag(parser)
    add_load(parser.add_argument_group("load"))
    add_prompts(parser.add_argument_group("prompts"))
    add_server(parser.add_argument_group("the server"))
    add_judgement(parser.add_argument_group("judgement"))
    add_truth(parser.add_argument_group("truth checks and trouble"))
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, metavar="DIR", help="write report.html, report.json and requests.csv there")
    output.add_argument("--quiet", action="store_true", help="no live progress")


def add_load(group: Any) -> None:
    number(group, "--rate", 2.0, "R", "requests (sessions, with --turns) that begin per second")
    group.add_argument("--arrivals", default="poisson", metavar="SHAPE", help=f"{SHAPES} (default: %(default)s)")
    group.add_argument(
        "--concurrency", type=int, metavar="N", help="N users who each wait for an answer; excludes --rate"
    )
    group.add_argument(
        "--agents",
        type=int,
        metavar="N",
        help="N agents that call tools and return with longer histories; changes the defaults of other flags; "
        "excludes --rate and --concurrency",
    )
    group.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help=f"seconds in which requests begin (default: {DURATION_S:g}, or all of a trace; with --agents "
        f"{AGENTS_DURATION_S:g})",
    )
    group.add_argument("--requests", type=int, metavar="N", help="at most N requests")
    number(group, "--warmup", 0.0, "S", "the first S seconds do not count")
    number(group, "--drain", 60.0, "S", "longest wait for answers after --duration")
    number(group, "--timeout", 300.0, "S", "longest wait for one answer")
    group.add_argument(
        "--seed", type=int, default=0, help="the same seed sends the same requests (default: %(default)s)"
    )


def add_prompts(group: Any) -> None:
    usual(group, "--prompt-tokens", "N", f"approximate; {FORMS}")
    usual(group, "--output-tokens", "N", "limit of answers, in the same forms")
    usual(group, "--turns", "N", "turns of a session, in the same forms")
    usual(group, "--think", "S", f"seconds between an answer and the next turn; {PAUSE_FORMS}")
    usual(
        group, "--fan-out", "N", "requests that a later turn sends at once, with one history, in the forms of lengths"
    )
    usual(group, "--prefix-tokens", "N", "a system prompt of about N tokens that sessions share", int)
    usual(group, "--prefix-groups", "N", "number of different system prompts", int)
    group.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt per line, or .jsonl with prompt, messages or turns"
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake's format: timestamp, lengths, hash_ids; excludes --rate"
    )
    number(group, "--trace-speed", 1.0, "X", "2 replays it in half the time")
    whole(
        group,
        "--longest-prompt",
        0,
        "N",
        "cut the trace's prompts to N tokens, for models with a short context; 0: never",
    )


def add_server(group: Any) -> None:
    group.add_argument("--api", choices=("chat", "completions"), default="chat", help="(default: %(default)s)")
    group.add_argument("--model", default="", help="(default: the first model that the server names)")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the server's key")
    group.add_argument("--ca", type=Path, metavar="FILE", help="CA of the server's certificate, if not a public CA")
    group.add_argument("--admin-key-file", type=Path, metavar="FILE", help="admin key (default: the launcher's)")
    number(group, "--temperature", 0.0, "T", "above 0 tokens can't be compared")
    group.add_argument(
        "--extra-body",
        default="{}",
        metavar="JSON",
        help="more fields, e.g. '{\"ignore_eos\": true}'; null removes a field",
    )


def add_judgement(group: Any) -> None:
    group.add_argument(
        "--slo",
        default="ttft<2s,tpot<100ms",
        help="bounds on ttft, tpot, itl (longest wait), e2e (default: %(default)s)",
    )
    number(group, "--reading-tps", 10.0, "R", "tokens per second that a reader reads, for smooth goodput")
    group.add_argument(
        "--sweep",
        action="store_true",
        help="find the highest rate within the SLO, in about 8 runs; --rate is the first rate",
    )
    number(group, "--slo-share", 0.9, "X", "share of requests within the SLO that a rate must reach in a sweep")


def add_truth(group: Any) -> None:
    whole(group, "--golden", 4, "N", "golden prompts; 0: none")
    whole(group, "--golden-every", 10, "N", "each Nth request of the load is a golden one")
    group.add_argument(
        "--golden-file",
        type=Path,
        metavar="FILE",
        help="golden answers; if this file does not exist, they are asked for and saved",
    )
    number(group, "--near-tie", 0.1, "X", "a difference is doubtful where the best two tokens are within X in logprob")
    number(group, "--stall", 2.0, "S", "a wait between two chunks of this length is a stall")
    number(group, "--rest", 15.0, "S", "longest wait for memory to be free after the load")
    number(group, "--hang-up", 0.0, "X", "share of the clients that leave early")
    group.add_argument(
        "--storm",
        action="append",
        default=[],
        metavar="S:X",
        help="at S seconds, hang up on the share X of the open requests",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="resume broken streams (Last-Event-ID) at any of the given routers",
    )
    group.add_argument(
        "--drill", metavar="WHAT", help="kill:NODE@S, drain:NODE@S or restart:NODE@S (kill: a process of this machine)"
    )


def number(group: Any, flag: str, default: float, metavar: str, text: str) -> None:
    group.add_argument(flag, type=float, default=default, metavar=metavar, help=f"{text} (default: %(default)g)")


def usual(group: Any, flag: str, metavar: str, text: str, kind: type = str) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    defaults = f"(default: {getattr(PLAIN, name)}; with --agents {getattr(AGENTS, name)})"
    group.add_argument(flag, type=kind, metavar=metavar, help=f"{text} {defaults}")


def whole(group: Any, flag: str, default: int, metavar: str, text: str) -> None:
    group.add_argument(flag, type=int, default=default, metavar=metavar, help=f"{text} (default: %(default)d)")
