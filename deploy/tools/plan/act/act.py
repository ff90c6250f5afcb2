"""Run a `Balancer`: look at the cluster, order moves, and report."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from deploy.cluster.admin import AdminClient, read_admin_key
from deploy.metrics_page import parse_page
from deploy.ray.lead import LEASE_S
from deploy.router_url import DEFAULT_URL, parse_url, url_of
from deploy.tools.plan.act.balance import DECODE, PREFILL, Balancer, BalanceSettings, ClusterLook, RoleMove
from deploy.tools.plan.act.look import look_at
from deploy.tools.plan.act.size import Sizer
from deploy.tools.plan.act.sizing import Sizing
from deploy.tools.traffic.figures.slo import parse_slo
from shared.config.load import load
from shared.config.processes import RayClusterConfig
from shared.config.settings import ray_settings
from shared.core import extras
from shared.core.errors import ConfigError

SUMMARY_S = 30.0
Say = Callable[[str], None]


class Actor:
    """With `is_dry`, only report. With `sizing`, also decide the number of nodes."""

    def __init__(
        self, client: AdminClient, balancer: Balancer, say: Say, *, is_dry: bool = False, sizing: Sizing | None = None
    ) -> None:
        self._client = client
        self._balancer = balancer
        self._say = say
        self._is_dry = is_dry
        self._sizing = sizing
        self._trouble = ""
        self._said_at = -math.inf

    def turn(self, now: float) -> None:
        """If the router does not answer, the next turn asks again."""
        try:
            look = self._look(now)
        except ConfigError as error:
            if error.message != self._trouble:
                self._say(error.message)
            self._trouble = error.message
            return
        self._trouble = ""
        moves = self._balancer.see(look)
        for move in moves:
            self._order(move)
        if self._sizing is not None:
            first = self._sizing.turn(look, None if moves else self._balancer.demand)
            if first is not None:  # this move must come before a node can leave
                self._balancer.begin([first], look.at)
                self._order(first)
        if now - self._said_at >= SUMMARY_S:
            self._said_at = now
            self._say(summary(look, self._balancer))

    def _look(self, now: float) -> ClusterLook:
        status = self._client.status()
        return look_at(status, parse_page(self._client.text("/metrics")), now)

    def _order(self, move: RoleMove) -> None:
        self._say(f"{move.node} becomes a {move.role} node: {move.why}{' (dry run)' if self._is_dry else ''}")
        if self._is_dry:
            self._balancer.refused(move)
            return
        least = self._balancer.settings.least
        try:
            self._client.call("POST", "/admin/role", {"node": move.node, "role": move.role, "least": least})
        except ConfigError as error:
            self._say(f"{move.node} stays as it is: {error.message}")
            self._balancer.refused(move)


def summary(look: ClusterLook, balancer: Balancer) -> str:
    nodes = f"{len(look.of(PREFILL))} prefill and {len(look.of(DECODE))} decode nodes"
    demand = balancer.demand
    if demand is None:
        return f"{nodes}; looking"
    short = "; both roles are full: more nodes are needed" if balancer.is_short(look) else ""
    return f"{nodes}; work for {demand.prefill:.1f} and {demand.decode:.1f}{short}"


def run(args: argparse.Namespace) -> int:
    """Block until SIGINT or SIGTERM."""
    slo = parse_slo(args.slo)
    settings = BalanceSettings(min(slo.tpot, slo.itl), window_s=args.window, least=args.least)
    client = AdminClient(url_of(args) or parse_url(DEFAULT_URL), read_admin_key(args.admin_key_file), args.ca)
    client.status()  # a wrong address or key ends the command here
    say = functools.partial(print_line, sys.stdout)  # before Ray's client redirects stdout
    with ray_sizing(args, settings, say) as sizing:
        act_until_signal(Actor(client, Balancer(settings), say, is_dry=args.dry_run, sizing=sizing), args.period)
    return 0


@contextlib.contextmanager
def ray_sizing(args: argparse.Namespace, settings: BalanceSettings, say: Say) -> Iterator[Sizing | None]:
    if args.ray is None:
        yield None
        return
    extras.require("ray", "--ray")
    config = fleet_config(args.ray, args.period)
    from deploy.ray.lead_client import fleet_of

    with fleet_of(config) as fleet:
        scaling = fleet.look().scaling  # without a running cluster, the command ends here
        sizing = Sizing(fleet, Sizer(scaling, settings.window_s, settings.least), say, is_dry=args.dry_run)
        try:
            yield sizing
        finally:
            sizing.end()


def fleet_config(path: Path, period_s: float) -> RayClusterConfig:
    """Return the file's settings. Call this before Ray is imported, to set variables that Ray reads.

    Raise ConfigError if the file lacks a role, or the period is too long for the lease.
    """
    config = load(RayClusterConfig, {}, path)
    if not config.ray.prefill or not config.ray.decode:
        raise ConfigError(
            f"{path}: --ray needs prefill and decode nodes in [ray]; `baton ray up` scales one role alone"
        )
    if period_s > LEASE_S / 3:
        raise ConfigError(f"--period is {period_s:g}; with --ray at most {LEASE_S / 3:g}, to lead without gaps")
    ray_settings.apply(config.ray.address)
    return config


def act_until_signal(actor: Actor, period_s: float) -> None:
    over = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        over.set()

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not over.is_set():
            actor.turn(time.monotonic())
            over.wait(period_s)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def print_line(sink: TextIO, line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sink, flush=True)
