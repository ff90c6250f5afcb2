"""The command lines of `baton verify` and `baton replay`. What loads torch or cryptography is imported late."""

from __future__ import annotations

import argparse
from pathlib import Path

from deploy.tools.certify.settings import FLAGS, ReplayConfig
from shared.config.flags import add_flags, concerns_of, fields_of, given_values
from shared.config.load import load

VERIFY = """\
baton verify: check what a router has certified of an answer. Works offline, and needs no model.

  baton keys certificate router.pem > public.pem                   at the router: make a key; then --certificate-key
  curl ... -d '{..., "certificate": true, "return_token_ids": true}' > answer.json
  baton verify answer.json --key public.pem

A file holds an answer, a stream's events, or one of these per line. Token ids, if they are there, are compared with the
certificate's digests. Exits with 0 if all is certified, with 1 if something is wrong, with 2 for unusable files.
"""
REPLAY = """\
baton replay: compute certified answers again with one engine on this machine, and compare the tokens.

  baton replay answer.json --model smollm2                         an answer with token ids
  baton replay answer.json --prompt request.json --model smollm2   one without those of its prompt
  baton replay --log answers.jsonl --key public.pem                many, together; only differing ones are told

The engine must have the certificate's fingerprint: same weights, formats and numerics version. Where tokens differ, the
first one is named, and by how much the engine prefers its own. If a library ran the model (near-ties), a margin within
what the library's check allows is no difference. Exits with 0 if all are equal, with 1 if one differs or a signature is
wrong, with 2 if one could not be computed here.
"""


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="CERT", help="answers with certificates")
    add_key(parser, "public key of a router; repeat it after a change of keys", is_needed=True)


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="CERT", help="answers with certificates")
    parser.add_argument("--log", type=Path, metavar="FILE", help="many answers, one per line; only failures are told")
    parser.add_argument(
        "--prompt",
        type=Path,
        metavar="FILE",
        help="the request's JSON body or its text: its prompt and chat template are compared with the certified ones",
    )
    add_key(parser, "also check the signatures, with this public key; repeat it after a change of keys")
    fields = {field.name for kind in concerns_of(ReplayConfig).values() for field, _ in fields_of(kind)}
    add_flags(parser, ReplayConfig, frozenset(fields - FLAGS))


def add_key(parser: argparse.ArgumentParser, text: str, *, is_needed: bool = False) -> None:
    parser.add_argument(
        "--key", action="append", type=Path, default=[], required=is_needed, metavar="PUBLIC", help=text
    )


def verify(args: argparse.Namespace) -> int:
    from deploy.tools.certify.verify import verify_files

    return verify_files(args.files, args.key)


def replay(args: argparse.Namespace) -> int:
    from deploy.tools.certify.run import replay_files

    return replay_files(load(ReplayConfig, given_values(args)), args.files, args.log, args.prompt, args.key)
