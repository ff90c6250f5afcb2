"""Test whether a server keeps the contract for exactly-once streams.

Ends with 0 if all that is offered passes, 1 if a rule fails, 2 if there is no stream to test, 3 if the server offers no
streams that continue.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from stream_conformance.apis import APIS
from stream_conformance.client import Asker
from stream_conformance.rules import RULES, judge, name_of
from stream_conformance.run import PROMPT, Options, Run

WIDTH = max(len(name_of(check)) for check in RULES)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="stream-conformance", description=__doc__)
    made.add_argument("url", nargs="+", help="the server; several: they should continue each other's streams")
    made.add_argument("--model", default="default")
    made.add_argument("--key", default="", help="the API key")
    made.add_argument("--api", choices=APIS, default="chat")
    made.add_argument("--prompt", default=PROMPT, help="one with a long answer (numbers as words)")
    made.add_argument("--max-tokens", type=int, default=24, metavar="N", help="of most answers; some have 8 N (24)")
    made.add_argument(
        "--fault-hook", default="", metavar="CMD", help="a shell command to run in the middle of a stream"
    )
    made.add_argument("--patience-s", type=float, default=60.0, metavar="X", help="for a stream to go on (60)")
    made.add_argument("--timeout-s", type=float, default=60.0, metavar="X", help="longest silence of a connection (60)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    api = APIS[args.api]
    asker = Asker(args.url, api.path, args.key, args.timeout_s)
    options = Options(args.model, args.prompt, args.max_tokens, bool(args.key), args.fault_hook, args.patience_s)
    verdicts = []
    print(f"{'rule':{WIDTH}}  {'result':11}  remark")
    try:
        for verdict in judge(Run(asker, api, options)):
            print(f"{verdict.rule:{WIDTH}}  {verdict.result:11}  {verdict.remark}".rstrip(), flush=True)
            verdicts.append(verdict)
    except ConnectionError as error:
        print(error, file=sys.stderr)
        return 2
    if any(verdict.result == "fail" for verdict in verdicts):
        return 1
    return 3 if verdicts[0].result == "not offered" else 0
