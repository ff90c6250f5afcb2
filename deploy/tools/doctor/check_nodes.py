"""Judge the nodes, and name the fields that keep two nodes from pairing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from urllib.parse import urlsplit

import msgspec

from deploy.tools.doctor.facts import Cluster, ReadyFacts, SeenNode
from deploy.tools.doctor.finding import BROKEN, LOOK, OK, Finding, or_well
from shared.config.settings.endpoints import is_loopback, same_host
from shared.core.states import NodeState
from shared.wire.fitting import REPORTED_ONLY, misfit
from shared.wire.messages import Fingerprint

PREFILL, DECODE = "prefill", "decode"
SHARED_MEMORY, FRAMES = "shm", "zmq"
SHOWN_CHARS = 60
ADVICE = {
    "protocol": "install the same version of Baton on both",
    "numerics": "install the same version of Baton on both",
    "model": "start both with the same --model",
    "weights": "start both with the same model file, --weight-dtype and --attention; auto differs with a GPU, AMX or "
    "FlashInfer. One that says plain torch has no x86-64 processor with FMA: pair it with its like",
    "dtype": "start both with the same --dtype",
    "page_size": "start both with the same --page-size",
    "page_layout": "start both with the same --model, --dtype and --spec, on GPUs also with the same --tp",
    "spec": "start both with the same --spec flags and head; or the prefill node with --spec none",
    "build": "a rolling upgrade does this; finish it",
    "grammar": (
        "requests with a grammar or tools are not handed over between these: use the same model folder and llguidance "
        "on both. Nodes with --pp follow no grammars"
    ),
}


def check_nodes(cluster: Cluster) -> list[Finding]:
    found = check_ready(cluster.url, cluster.ready) + check_strangers(cluster.ready)
    status = cluster.status
    if status is None:
        what = f"nodes can't be compared: {cluster.no_status}"
        advice = "give its admin key (--admin-key-file FILE), and run the same version of this command as the router"
        found.append(Finding("nodes", cluster.url, LOOK, what, advice))
        return found + check_misfits(cluster.ready)
    found += [finding for node in status.nodes for finding in check_state(node)]
    found += or_well(check_fields(status.nodes), "pairs", "cluster", "all fields of all nodes fit")
    found += or_well(check_transports(status.nodes), "transports", "cluster", "every pair has a transport")
    return found + check_sizes(status.nodes)


def check_ready(url: str, ready: ReadyFacts) -> list[Finding]:
    if not ready.num_nodes:
        advice = "start nodes with --router and this router's --node-endpoint"
        return [Finding("nodes", url, BROKEN, "no node has dialled in", advice)]
    if not ready.is_ready:
        return [Finding("nodes", url, BROKEN, "no node takes requests", "see the nodes' states below")]
    if not ready.is_pair:
        what = "nodes of one role only: requests are served, but not disaggregated"
        return [Finding("nodes", url, LOOK, what, "start a node of the other role")]
    return [Finding("nodes", url, OK, f"{ready.num_nodes} nodes, prefill and decode")]


def check_strangers(ready: ReadyFacts) -> list[Finding]:
    said = "is of another version than its router, and gets no requests"
    return [
        Finding("nodes", one.node, BROKEN, f"{said} (protocol {one.protocol}, not {one.ours})", ADVICE["protocol"])
        for one in ready.strangers
    ]


def check_misfits(ready: ReadyFacts) -> list[Finding]:
    """Without the admin key, the router names only the first field in which a pair of nodes differs."""
    return [
        Finding("pairs", f"{one.a}, {one.b}", BROKEN, f"{one.differs} differs", ADVICE.get(one.differs, ""))
        for one in ready.misfits
    ]


def check_state(node: SeenNode) -> list[Finding]:
    says: dict[str, tuple[str, str, str]] = {
        NodeState.SILENT: (
            BROKEN,
            f"silent for {node.last_seen_s:.0f} s",
            "check that it runs and can reach the router",
        ),
        NodeState.AVOIDED: (LOOK, "requests there failed, so it gets none for a while", "see its log for why"),
        NodeState.DRAINING: (LOOK, "it drains and takes no new requests", "nothing, if that is intended"),
    }
    if node.state not in says:
        return []
    level, what, advice = says[node.state]
    return [Finding("nodes", node.name, level, what, advice)]


def check_fields(nodes: Sequence[SeenNode]) -> list[Finding]:
    pairs = pairs_of(nodes)
    found = []
    for field in Fingerprint.__struct_fields__:
        apart = [(p, d) for p, d in pairs if differs(p.hello.fingerprint, d.hello.fingerprint, field)]
        if apart:
            members = list({node.name: node for pair in apart for node in pair}.values())
            level = LOOK if field in REPORTED_ONLY or all_have_partners(nodes) else BROKEN
            where = ", ".join(sorted(node.name for node in members))
            found.append(Finding("pairs", where, level, say_values(field, members), ADVICE[field]))
    return found


def pairs_of(nodes: Sequence[SeenNode]) -> list[tuple[SeenNode, SeenNode]]:
    return [(p, d) for p in nodes if p.role == PREFILL for d in nodes if d.role == DECODE]


def differs(prefill: Fingerprint, decode: Fingerprint, field: str) -> bool:
    """Return whether this field alone keeps the two nodes from pairing.

    All other fields are made equal, except `spec`, because it decides which differences are allowed.
    """
    if field in REPORTED_ONLY:
        return bool(getattr(prefill, field) != getattr(decode, field))
    only = {name: getattr(prefill, name) for name in (field, "spec")}
    return misfit(msgspec.structs.replace(decode, **only), decode) == field


def all_have_partners(nodes: Sequence[SeenNode]) -> bool:
    fitting = {node.name for p, d in pairs_of(nodes) if fits(p, d) for node in (p, d)}
    return fitting == {node.name for node in nodes}


def fits(prefill: SeenNode, decode: SeenNode) -> bool:
    return misfit(prefill.hello.fingerprint, decode.hello.fingerprint) is None


def say_values(field: str, nodes: Sequence[SeenNode]) -> str:
    """Format values like `page_size: 16 on p0, p1; 32 on d0`."""
    groups: dict[str, list[str]] = {}
    for node in nodes:
        groups.setdefault(str(getattr(node.hello.fingerprint, field)), []).append(node.name)
    shown = [f"{shorten(value)} on {', '.join(sorted(names))}" for value, names in groups.items()]
    return f"{field}: {'; '.join(shown)}"


def shorten(value: str) -> str:
    return value if len(value) <= SHOWN_CHARS else f"{value[:SHOWN_CHARS]}..."


def check_transports(nodes: Sequence[SeenNode]) -> list[Finding]:
    return [finding for p, d in pairs_of(nodes) if fits(p, d) for finding in check_pair(p, d)]


def check_pair(prefill: SeenNode, decode: SeenNode) -> list[Finding]:
    a, b = prefill.hello, decode.hello
    where = f"{prefill.name}, {decode.name}"
    both = set(a.transports) & set(b.transports)
    is_far = not same_host(a.host_id, b.host_id)
    has = f"{prefill.name} has {', '.join(a.transports) or 'none'}; {decode.name} {', '.join(b.transports) or 'none'}"
    if not both - ({SHARED_MEMORY} if is_far else set()):
        far = ", and they share no memory (another machine, container or user)" if is_far else ""
        advice = "start both with --transport auto"
        return [Finding("transports", where, BROKEN, f"no transport that both can use: {has}{far}", advice)]
    if not is_far and SHARED_MEMORY not in both:
        what = f"pages travel through sockets, though memory could be shared: {has}"
        return [Finding("transports", where, LOOK, what, "start both with --transport auto")]
    return []


def check_sizes(nodes: Sequence[SeenNode]) -> list[Finding]:
    contexts = {node.name: node.hello.max_context for node in nodes}
    if len(set(contexts.values())) < 2:
        return []
    smallest = min(contexts, key=lambda name: contexts[name])
    what = f"max_context: {', '.join(f'{size} on {name}' for name, size in sorted(contexts.items()))}"
    return [Finding("sizes", smallest, LOOK, what, "longer requests can't use the smallest: give it more --kv-bytes")]


def check_addresses(nodes: Sequence[SeenNode]) -> list[Finding]:
    """Report loopback addresses of nodes with different host ids. The findings have the level LOOK, because containers
    of one machine also have different ids."""
    lonely = {
        node.name: node.hello.node_endpoint
        for one, other in combinations(nodes, 2)
        if not same_host(one.hello.host_id, other.hello.host_id)
        for node in (one, other)
        if is_loopback(urlsplit(node.hello.node_endpoint).hostname or "")
    }
    advice = "if nodes are on several machines: --bind-host ADDRESS, with --keys"
    return [
        Finding("ports", name, LOOK, f"it names {endpoint.partition('#')[0]}, which other machines can't dial",
                advice)
        for name, endpoint in lonely.items()
    ]  # fmt: skip
