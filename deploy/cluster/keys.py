"""The command line of `baton keys`. The steps load zmq, so they are imported only when they run."""

from __future__ import annotations

import argparse
from pathlib import Path

from router.tenants.tenant import RIGHTS

DESCRIPTION = """\
baton keys: decide who may take part in a cluster. Every router and node has its own key, and its name is bound to that
key. Their ZeroMQ connections are encrypted (CURVE). Make all keys in one folder on a machine that you trust, then copy:

  DIR/allowed        to every machine: public keys only, the same file everywhere
  DIR/NAME.secret    to the machine that runs NAME, and to no other

into a folder of mode 700 there, files of mode 600 (`scp -p`, `rsync -a` keep them).

  baton keys create DIR --router router --node prefill-0 decode-0      run it again with new names to add keys
  baton router  --keys DIR --router-id router --node-endpoint tcp://10.0.0.1:7001
  baton prefill --keys DIR --node-id prefill-0 --bind-host 10.0.0.2 --router tcp://10.0.0.1:7001
  baton decode  --keys DIR --node-id decode-0  --bind-host 10.0.0.3 --router tcp://10.0.0.1:7001
  baton up      --keys DIR          one machine; the names are router, prefill-0, decode-0, ...

A new key for NAME takes three steps. Nothing restarts: running routers and nodes notice changed files within a second,
and streams go on:

  baton keys rotate DIR NAME               both keys are allowed; copy DIR/allowed to every machine
  baton keys rotate DIR NAME --use         NAME uses its new key; on its machine: this command, or copy DIR/NAME.secret
  baton keys rotate DIR NAME --drop-old    only the new one is allowed; copy DIR/allowed to every machine

  baton keys remove DIR NAME               a machine is gone or was broken into; copy DIR/allowed to every machine
  baton keys show DIR                      who is allowed, whose secrets are here, which rotations are under way

Clients have keys of another kind, in one file of the router's that holds their hashes and limits:

  baton keys tenant FILE NAME              a key for a new tenant, or one more for a known one; printed once
  baton router --api-key-file FILE         follows the file: no restart when it changes

So have operators, for `baton admin` and /admin. A file with one bare key gives that key all rights:

  baton keys admin FILE NAME --rights drain     a key that may see the cluster, and drain and restart nodes
  baton router --admin-key-file FILE            follows the file, too

A router that signs certificates of answers has a key of a third kind, Ed25519 in PEM form. Who checks certificates gets
its public half, which the command prints. For a new key make a new file, publish its public half beside the old one,
which old answers need, and move the file to the old one's place:

  baton keys certificate FILE                   a key, if the file is missing, and its public half
  baton router --certificate-key FILE           signs for requests with "certificate": true; follows the file
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = add_action(actions, "create", "make keys, and the folder; names that are there already keep theirs")
    create.add_argument("--router", nargs="+", default=[], metavar="NAME", help="routers' names, as in --router-id")
    create.add_argument("--node", nargs="+", default=[], metavar="NAME", help="nodes' names, as in --node-id")
    add_action(actions, "show", "who is allowed, and whose secrets are here")
    rotate = add_action(actions, "rotate", "a new key for one name, in three steps")
    rotate.add_argument("name")
    steps = rotate.add_mutually_exclusive_group()
    steps.add_argument("--use", action="store_true", help="second step: the new key replaces the old one")
    steps.add_argument("--drop-old", action="store_true", help="third step: refuse the old key")
    add_action(actions, "remove", "refuse the key of a router or node").add_argument("name")
    add_tenant_action(actions)
    add_admin_action(actions)
    text = "the public half of the key that signs certificates of answers; the key is made if it is missing"
    certificate = actions.add_parser("certificate", help=text, description=text)
    certificate.add_argument("file", type=Path, metavar="FILE", help="the router's --certificate-key")


def add_admin_action(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "a key for an operator: printed once, its hash written into the router's file of admin keys"
    admin = actions.add_parser("admin", help=text, description=text)
    admin.add_argument("file", type=Path, metavar="FILE", help="the router's --admin-key-file; made if it is missing")
    admin.add_argument("name", metavar="NAME", help="who has the key; the log names it with each call")
    admin.add_argument(
        "--rights",
        nargs="+",
        choices=RIGHTS,
        metavar="RIGHT",
        help="a new operator's rights (default: see): see: state and metrics; drain: drain and restart nodes; change: "
        "roles, adapters, ending answers; the last two include see",
    )


def add_tenant_action(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "a key for a tenant of the HTTP API: printed once, its hash written into the router's keys file"
    tenant = actions.add_parser("tenant", help=text, description=text)
    tenant.add_argument("file", type=Path, metavar="FILE", help="the router's --api-key-file; made if it is missing")
    tenant.add_argument("name", metavar="NAME")
    for unit in ("requests", "tokens"):
        flag = f"--{unit}-per-minute"
        tenant.add_argument(flag, type=int, default=0, metavar="N", help="limit of a new tenant (default: none)")
    tenant.add_argument(
        "--priority", type=int, default=0, metavar="N", help="a new tenant's priority; higher goes first (default: 0)"
    )


def add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text, description=text)
    action.add_argument("folder", type=Path, metavar="DIR")
    return action


def run(args: argparse.Namespace) -> int:
    if args.action == "tenant":
        from deploy.cluster.tenant_keys import add_tenant

        file: Path = args.file.expanduser()
        add_tenant(file, args.name, args.requests_per_minute, args.tokens_per_minute, args.priority)
        return 0
    if args.action == "admin":
        from deploy.cluster.tenant_keys import add_operator

        add_operator(args.file.expanduser(), args.name, args.rights)
        return 0
    if args.action == "certificate":
        from router.certify.signing import make_secret, public_pem

        print(public_pem(make_secret(args.file.expanduser())), end="")
        return 0
    from deploy.cluster.key_steps import create, drop_old, prepare, remove, shown_keys, use

    folder: Path = args.folder.expanduser()
    if args.action == "create":
        create(folder, args.router, args.node)
    elif args.action == "show":
        print(shown_keys(folder), end="")
    elif args.action == "remove":
        remove(folder, args.name)
    elif args.use:
        use(folder, args.name)
    elif args.drop_old:
        drop_old(folder, args.name)
    else:
        prepare(folder, args.name)
    return 0
