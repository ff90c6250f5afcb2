"""Run `baton doctor`: gather facts, judge them, report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.cluster.admin import read_admin_key
from deploy.router_http import RouterHttp, read_api_key
from deploy.router_url import DEFAULT_URL, parse_url, url_of
from deploy.tools.doctor.check_clocks import check_clocks
from deploy.tools.doctor.check_gpu import check_gpus
from deploy.tools.doctor.check_keys import check_keys
from deploy.tools.doctor.check_links import check_dial, check_links
from deploy.tools.doctor.check_machine import check_machine
from deploy.tools.doctor.check_nodes import check_nodes
from deploy.tools.doctor.check_pages import check_pages
from deploy.tools.doctor.facts import Cluster, DialFacts, Facts, GpuFacts, MachineFacts
from deploy.tools.doctor.finding import BROKEN, LEVELS, LOOK, OK, Finding, worst
from deploy.tools.doctor.look_here import dial, look_at_keys, look_at_machine, take_pulse
from deploy.tools.doctor.look_router import NoRouterError, look_at_router
from shared.config.settings.endpoints import check_endpoint, is_any, is_loopback
from shared.core.errors import ConfigError

MARKS = {"ok": "ok    ", "look": "look  ", "broken": "BROKEN"}
ROOT = 0
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 600.0


def run(args: argparse.Namespace) -> int:
    check(args)
    facts = gather(args)
    findings = examine(facts)
    print(as_json(facts.url, findings) if args.json else as_text(findings))
    return 1 if worst(findings) == BROKEN else 0


def check(args: argparse.Namespace) -> None:
    if not MIN_INTERVAL_S <= args.interval <= MAX_INTERVAL_S:
        raise ConfigError(f"--interval is {args.interval:g}; choose {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds")
    for endpoint in args.dial:
        check_endpoint(endpoint, "--dial", has_keys=True)


def gather(args: argparse.Namespace) -> Facts:
    named = url_of(args)
    url = named or parse_url(DEFAULT_URL)
    http = RouterHttp(url, read_admin_key(args.admin_key_file), args.ca, other_key=read_api_key(args.api_key_file))
    before = take_pulse()
    cluster, no_cluster = look_at_cluster(http, args.interval)
    if cluster is None:
        time.sleep(args.interval)  # take_pulse() needs this time between its two calls
    machine = look_at_machine(before, take_pulse())
    return Facts(
        url=str(url),
        cluster=cluster,
        no_cluster=no_cluster,
        must_answer=named is not None,
        dials=tuple(dial_all(cluster, url.host, args.dial)),
        machine=machine,
        keys=tuple(look_at_keys(folder, uid) for folder, uid in key_folders(args.keys, machine)),
        gpus=look_at_gpu_here() if args.gpu else None,
    )


def examine(facts: Facts) -> list[Finding]:
    return [
        *examine_cluster(facts),
        *map(check_dial, facts.dials),
        *check_machine(facts.machine),
        *check_keys(facts.keys),
        *(check_gpus(facts.gpus) if facts.gpus is not None else []),
    ]


def examine_cluster(facts: Facts) -> list[Finding]:
    """A missing router is a fault only if the user named it."""
    cluster = facts.cluster
    if cluster is None:
        level = BROKEN if facts.must_answer else LOOK
        return [Finding("router", facts.url, level, facts.no_cluster, "start one, or name its URL")]
    clocks = check_clocks(cluster.status) if cluster.status is not None else []
    return [*check_nodes(cluster), *check_pages(cluster), *check_links(cluster), *clocks]


def as_text(findings: Sequence[Finding]) -> str:
    """Return the findings as lines, the worst first."""
    ordered = sorted(findings, key=lambda finding: -LEVELS.index(finding.level))
    lines = [line for finding in ordered for line in lines_of(finding)]
    counts = ", ".join(f"{sum(f.level == level for f in findings)} {level}" for level in reversed(LEVELS))
    return "\n".join([*lines, "", f"in all: {counts}"])


def lines_of(finding: Finding) -> list[str]:
    line = f"{MARKS[finding.level]}  {finding.check:<10} {finding.where}: {finding.what}"
    return [line] if finding.level == OK or not finding.advice else [line, f"{'':8}what to do: {finding.advice}"]


def as_json(url: str, findings: Sequence[Finding]) -> str:
    body = {"url": url, "worst": worst(findings), "findings": [dataclasses.asdict(finding) for finding in findings]}
    return json.dumps(body, indent=2)


def look_at_gpu_here() -> GpuFacts:
    from deploy.tools.doctor.look_gpu import look_at_gpus
    from shared.device.torch_cuda import TorchCuda

    return look_at_gpus(TorchCuda())


def look_at_cluster(http: RouterHttp, interval_s: float) -> tuple[Cluster | None, str]:
    try:
        return look_at_router(http, str(http.url), interval_s, time.sleep), ""
    except NoRouterError as error:
        return None, str(error)


def key_folders(given: Path | None, machine: MachineFacts) -> list[tuple[Path, int]]:
    """Return (keys folder, its user's uid) pairs: of `given`, or else of all daemons' folders."""
    used = [(Path(keys), uid) for keys, uid in sorted({(one.keys, one.uid) for one in machine.daemons if one.keys})]
    if given is None:
        return used
    folder = given.expanduser()
    users = [uid for keys, uid in used if keys.resolve() == folder.resolve()]
    return [(folder, uid) for uid in users or [user_of(folder)]]


def user_of(folder: Path) -> int:
    """Return the user of a folder that no daemon uses: the caller, or the folder's owner if the caller is root.

    Root is assumed to check the folder for its owner.
    """
    own = os.geteuid()
    if own != ROOT:
        return own
    try:
        return folder.stat().st_uid
    except OSError:
        return own


def dial_all(cluster: Cluster | None, router_host: str, given: list[str]) -> list[DialFacts]:
    """Dial all endpoints. Leave out the cluster's loopback endpoints if the router is elsewhere."""
    known = []
    if cluster is not None and cluster.status is not None:
        known = [("router", cluster.status.endpoint)]
        known += [(node.name, node.hello.node_endpoint) for node in cluster.status.nodes]
    wanted = [(whose, endpoint) for whose, endpoint in known if is_near(endpoint, router_host)]
    return [dial(whose, endpoint) for whose, endpoint in [*wanted, *(("--dial", endpoint) for endpoint in given)]]


def is_near(endpoint: str, router_host: str) -> bool:
    host = endpoint.partition("#")[0].removeprefix("tcp://").rpartition(":")[0]
    if endpoint.startswith("ipc://") or is_loopback(host):
        return is_loopback(router_host)
    return not is_any(host)
