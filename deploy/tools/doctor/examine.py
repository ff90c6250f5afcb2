"""Apply all checks to all facts. Pure."""

from __future__ import annotations

from deploy.tools.doctor.check_clocks import check_clocks
from deploy.tools.doctor.check_gpu import check_gpus
from deploy.tools.doctor.check_keys import check_keys
from deploy.tools.doctor.check_links import check_dials, check_links
from deploy.tools.doctor.check_machine import check_machine
from deploy.tools.doctor.check_nodes import check_nodes
from deploy.tools.doctor.check_pages import check_pages
from deploy.tools.doctor.facts import Facts
from deploy.tools.doctor.finding import BROKEN, LOOK, Finding


def examine(facts: Facts) -> list[Finding]:
    return [
        *examine_cluster(facts),
        *check_dials(facts.dials),
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
