"""Make the policy with a given `--policy` name."""

from __future__ import annotations

from collections.abc import Callable

from router.policy.interface import Policy
from router.policy.least_load import LeastLoad
from router.policy.prefix_aware import PrefixAware
from router.policy.round_robin import RoundRobin

MAKERS: dict[str, Callable[[], Policy]] = {
    "prefix_aware": PrefixAware,
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
}


def make_policy(name: str) -> Policy:
    return MAKERS[name]()
