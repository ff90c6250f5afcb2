"""`baton prove URL`: from its flags to the report on one running server, which truth_run.py makes."""

from __future__ import annotations

import argparse

import msgspec

from deploy.router_http import RouterHttp, read_api_key
from deploy.router_url import Url, parse_url
from deploy.tools.prove.served import AnyServer
from deploy.tools.prove.truth_report import EXIT_UNTRUE, text_of
from deploy.tools.prove.truth_run import ProvedServer, prove_server
from deploy.tools.traffic.target import Server, look_at
from shared.core.errors import ConfigError


def prove_one(url: Url, args: argparse.Namespace) -> int:
    if args.layers:
        raise ConfigError(
            "--layers compares Baton's own clusters, or two URLs: for one running cluster give its URL twice"
        )
    key = read_api_key(args.api_key_file)
    server = Server(url, key, args.ca)
    target = look_at(server, args.model or "")
    pages = [Server(parse_url(page), key, args.ca) for page in args.metrics] or [server]
    asked = AnyServer(RouterHttp(url, key, args.ca), target.model, args.max_tokens)
    proved = ProvedServer(server, target.model, target.owner, pages)
    report = prove_server(proved, asked, args.dtype or "bfloat16", args.max_tokens, args.salt)
    print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() if args.json else text_of(report))
    return EXIT_UNTRUE if any(check.verdict == "failed" for check in report.checks) else 0
