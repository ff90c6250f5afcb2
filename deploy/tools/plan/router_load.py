"""Put a load on a running router, and return its records. Flags of `baton load` describe the load."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence

from rich.console import Console

from deploy.router_url import parse_url
from deploy.tools.traffic import options
from deploy.tools.traffic.load_plan import LoadPlan, plan_of
from deploy.tools.traffic.one_run import Outcome, RunContext, run_load
from deploy.tools.traffic.request_builder import RequestBuilder
from deploy.tools.traffic.target import Server, look_at


def load_plan(flags: Sequence[str]) -> LoadPlan:
    return plan_of(load_args(flags))


def load_args(flags: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return parser.parse_args([*flags])


def load_plan_of(args: argparse.Namespace) -> LoadPlan:
    """Return the load plan of `args`, which has some flags of `baton load`. The other flags have their defaults."""
    return plan_of(argparse.Namespace(**vars(load_args(())) | vars(args)))


def put_load(url: str, flags: Sequence[str], api: str = "chat") -> Outcome:
    """Block until the load is over."""
    server = Server(parse_url(url), "")
    context = RunContext(server, RequestBuilder(look_at(server, ""), api), Console(file=io.StringIO()), quiet=True)
    return run_load(load_plan([*flags, "--golden", "0", "--rest", "5"]), context, [])
