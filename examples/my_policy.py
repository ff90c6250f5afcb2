"""Write your own policy: long prompts go to big nodes. python examples/my_policy.py [FLAGS of baton router]

A router asks its policy once for each node that a request needs. Here prompts of more than 1,000 tokens go to the least
loaded node whose name begins with "big", and shorter prompts to the least loaded of the others.

This file replaces `round_robin` by this policy, so you can try it without changing the checkout. To keep the
policy, move its class to a file in router/policy. Add it to router/policy/policies.py, and to POLICIES in
shared/config/settings/router_settings.py. Then `baton up --policy NAME` uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import baton_serve

baton_serve.put_code_first()  # Baton's packages, such as `deploy`, can be imported from here on

from deploy import cli
from router.fleet.registry import RegisteredNode
from router.policy import policies
from router.policy.interface import Picked, Wanted
from router.policy.least_load import LeastLoad

LONG = 1000


class BigOnesForLong:
    reads_caches = False  # if True, nodes report their cached pages, for `wanted.cached(node)`

    def __init__(self) -> None:
        self._least_load = LeastLoad()

    def pick(self, nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        """Pick one of `nodes`, which have one role and can take the request."""
        is_long = wanted.num_tokens > LONG
        fitting = [node for node in nodes if node.node_id.startswith("big") == is_long]
        # if no node fits, any node is better than an error
        return self._least_load.pick(fitting or nodes, wanted)


if __name__ == "__main__":
    policies.MAKERS["round_robin"] = BigOnesForLong
    sys.exit(cli.main(["router", "--policy", "round_robin", *sys.argv[1:]]))
