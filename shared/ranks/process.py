"""Run a node's rank other than 0, started by rank 0 only.

The process applies the core plan before heavy imports. It ignores the stop signals, because rank 0 handles them and
then closes the socket.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import sys

from shared.config import core_plan
from shared.config.core_plan import CorePlan
from shared.config.flags import parse_int_list
from shared.core.errors import ConfigError, RankLost
from shared.core.exit_codes import EXIT_CONFIG
from shared.core.orphan_guard import die_with_parent
from shared.core.stop_signals import stop_signals
from shared.observe.log import Logger
from shared.ranks.orders import Start, hear

SAME_ERROR_S = 2.0  # between ranks that find the same error


def main() -> int:
    """Return 0 after rank 0 has closed the socket, 1 after RankLost, 2 after ConfigError."""
    args = make_parser().parse_args()
    die_with_parent(args.parent_pid)
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    core_plan.apply(CorePlan(threads=args.threads, cpus=args.cpus, wait_policy=args.wait_policy))
    with socket.socket(fileno=args.orders) as orders:
        start = hear(orders, Start)
        log = Logger(f"{args.of}.{args.rank}", sys.stderr, form=args.log_format)
        return run(start, orders, args.threads, log) if start is not None else 0


def run(start: Start, orders: socket.socket, threads: int, log: Logger) -> int:
    from shared.ranks.follower import follow_to_the_end

    try:
        follow_to_the_end(start, orders, threads)
    except RankLost as error:
        log.warning("out of step", error=error)
        return 1
    except ConfigError as error:
        if not ends_too(orders):
            log.error("this rank can't go on", error=error.message)
        return EXIT_CONFIG
    return 0


def ends_too(orders: socket.socket) -> bool:
    """Return whether rank 0 closes the socket soon. Then it has reported the same error."""
    orders.settimeout(SAME_ERROR_S)
    with contextlib.suppress(OSError):
        return not orders.recv(1)
    return False


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--of")
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--orders", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpus", type=parse_int_list, default=())
    parser.add_argument("--wait-policy")
    parser.add_argument("--log-format")
    return parser


if __name__ == "__main__":
    sys.exit(main())
