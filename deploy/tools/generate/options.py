"""The flags of `baton generate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.router_url import add_url
from shared.config.models import shipped_model

DESCRIPTION = """\
baton generate: answer a file of requests, offline. FILE has OpenAI's batch format, one request per line:

  {"custom_id": "a-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "smollm2", \
"max_tokens": 100, "messages": [{"role": "user", "content": "What is 5 plus 3?"}]}}

  baton generate requests.jsonl                     its own cluster, like `baton up`, until all is answered
  baton generate requests.jsonl --model FILE        the same, with your model
  baton generate requests.jsonl URL                 a running router; or --url URL
  baton generate requests.jsonl URL --out answers.jsonl --concurrency 64

You can stop it with Ctrl-C at any time. The same command goes on from there. Lines that have an answer are not asked
again, unless you changed them.
"""
EPILOG = """\
what it reads
  custom_id names a line, and no two lines may share one. method is POST, url is /v1/chat/completions or
  /v1/completions, body is what you would send there. Answers are written whole, so a body must not ask for a stream.

what it writes
  Answers go to requests.out.jsonl (--out), in the order in which they finish:
    {"id": "batch_req_...", "custom_id": "a-1", "response": {"status_code": 200, "request_id": "...", "body": {...}},
     "error": null}
  Lines without an answer go to requests.errors.jsonl (--errors). Each run begins that file anew; it exists only
  if a line failed. `response` is the server's refusal. If the server did not answer or was not asked,
  `error` has a code and a message.
  The id is a digest of the line, so a changed line is noticed. Its old answer stays, but the later one counts.

what is tried again
  A line with status 429 or 503 or a broken connection is tried again --retries times, after the server's Retry-After or
  growing waits. Every other refusal is the line's error. When the server no longer answers, the run ends; the same
  command goes on.

exit status
  0 every line has an answer, 1 some have none, 2 a flag or a file is invalid, 130 after Ctrl-C
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("file", type=Path, metavar="FILE", help="requests as JSON lines")
    add_url(parser, "default: a cluster of its own")
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, metavar="FILE", help="answers (default: beside the requests, *.out.jsonl)")
    files.add_argument("--errors", type=Path, metavar="FILE", help="lines without an answer (default: *.errors.jsonl)")
    asking = parser.add_argument_group("asking")
    asking.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="requests open at a time (default: %(default)s)"
    )
    asking.add_argument("--retries", type=int, default=10, metavar="N", help="retries of a line (default: %(default)s)")
    asking.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="longest wait for one answer (default: %(default)g)"
    )
    asking.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the router's key")
    asking.add_argument("--ca", type=Path, metavar="FILE", help="CA of the router's certificate, if not a public CA")
    asking.add_argument("--quiet", action="store_true", help="print neither progress nor summary, only errors")
    own = parser.add_argument_group("the command's own cluster, if no URL is given")
    own.add_argument(
        "--model", metavar="MODEL", help=f"a model as for `baton up --model` (default: {shipped_model.NAME})"
    )
    own.add_argument(
        "--up",
        default="",
        metavar="FLAGS",
        help="more flags of `baton up`, for example --up='--decode 2 --kv-dtype int8'",
    )
