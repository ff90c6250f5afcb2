"""What users of Baton see, as lines of text: flags, keys of files, metrics, HTTP paths, log events, environment.

`tests/unit/house/test_surface.py` compares it with the committed list. After an intended change:

    .venv/bin/python -m tests.support.house.surface

Log events, paths and environment variables are read off the source of all packages, wherever they are in them. The
rest is asked of the running code, through the imports below: these are all that a move of modules has to mend.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric

from deploy.cli import make_parser
from router.api.site.tables import APIS
from router.fleet.gateway_metrics import GatewayMetrics
from router.fleet.registry import Registry
from router.http.certificate import show_expiry
from shared.config.flags import concerns_of, fields_of
from shared.config.load import all_concerns
from shared.config.processes import RayClusterConfig
from shared.config.settings.options import option_of
from shared.observe.metric_names import NODE_HISTOGRAMS, QUEUE_PREFIX, QUEUE_STAGES
from shared.observe.metrics import ClusterMetrics, NodeReport, RequestMetrics
from shared.observe.node_metrics import NodeMetrics
from shared.observe.tenant_metrics import TenantMetrics
from tests.support.worlds.router_rig import hello

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "tests" / "unit" / "house" / "surface.txt"
PACKAGES = ("baton_serve", "router", "prefill_node", "decode_node", "shared", "deploy")
REWRITE = ".venv/bin/python -m tests.support.house.surface"

UNKNOWN = ["{}"]  # a text that only a run can tell
ANY = "*"  # a label value that is a name, or text: not from a closed set
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
TOLD_LATER = {"Alarm": 0, "drop": 1, "drop_late": 1}  # calls with an argument that a log line says, and which
METRIC = re.compile(r"baton_[a-z_]+")
VARIABLE = re.compile(r"[A-Z]{3,}(_[A-Z0-9]+)+")
IN_SCRIPT = re.compile(r"\$[({]?([A-Z][A-Z0-9_]+)|(?:^ENV |^Environment=|^ *- name: )([A-Z][A-Z0-9_]+)(?==|$)", re.M)

Trees = Sequence[ast.Module]


@cache
def sources() -> Trees:
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def walk(trees: Trees) -> Iterator[ast.AST]:
    return itertools.chain.from_iterable(map(ast.walk, trees))


def flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Each flag and word of a command, then those of its sub-commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield f"{parser.prog} {name}"
                yield from flags(inner)
        elif not isinstance(action, argparse._HelpAction):
            yield f"{parser.prog} {flag(action)}"


def flag(action: argparse.Action) -> str:
    name = "/".join(action.option_strings) or action.dest
    kind = type(action).__name__.strip("_").removesuffix("Action").lower()
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    count = f"nargs={action.nargs}" if action.nargs and action.option_strings else f"{action.nargs or ''}"
    required = "required" if action.required and action.option_strings else ""
    hidden = "hidden" if action.help == argparse.SUPPRESS else ""
    kind = "" if kind == "store" else kind
    parts = (name, str(action.metavar or ""), choices, count, kind, required, hidden, default_of(action))
    return " ".join(filter(None, parts))


def default_of(action: argparse.Action) -> str:
    """Flags of settings leave nothing in the namespace when they are not given: the help text has their default."""
    if action.default == argparse.SUPPRESS:
        told = re.search(r"\(default: (.*)\)$", action.help or "", re.DOTALL)
        return f"= {told[1]}" if told else ""
    if action.default is None or action.default is False or action.default == []:
        return ""
    return f"= {'empty' if action.default == '' else action.default}"


def file_keys() -> Iterator[str]:
    for table, settings in all_concerns().items():
        for field, kind in fields_of(settings):
            declared = option_of(field)
            name = "size" if declared.is_bytes else kind.__name__ if isinstance(kind, type) else str(kind)
            choices = " {" + ",".join(declared.choices) + "}" if declared.choices else ""
            low, high = declared.low, declared.high
            limits = f" from {low}" * (low is not None) + f" to {high}" * (high is not None)
            yield f"[{table}] {field.name}: {name}{choices}{limits} = {field.default!r}"
    yield from (f"baton ray up: [{table}]" for table in concerns_of(RayClusterConfig))


def families() -> list[Metric]:
    """Return what a router shows that served one request, with one node that reported all there is to report."""
    registry = CollectorRegistry()
    RequestMetrics(registry).refused(ANY)
    tenants = TenantMetrics(registry)
    tenants.used(ANY, 1)
    tenants.refused(ANY, ANY)
    queues = tuple(QUEUE_PREFIX + stage for stage in QUEUE_STAGES)
    counters, seen = NodeMetrics().counters(), dict.fromkeys((*NODE_HISTOGRAMS, *queues), (1.0,))
    ClusterMetrics(registry).update(NodeReport(ANY, ANY, 1, 1, {}, {}, 0, 1, counters, seen))
    nodes = Registry(1.0)
    nodes.hello(ANY, hello("decode", ANY), 0.0)
    GatewayMetrics(registry, nodes, lambda: 0, list, lambda: 0.0)
    show_expiry(registry, lambda: 0.0)
    for metric in list(registry._collector_to_names):
        names = getattr(metric, "_labelnames", ())
        if names and not metric._metrics:  # type: ignore[attr-defined]  # only metrics have labels
            metric.labels(*[ANY] * len(names))  # type: ignore[attr-defined]
    shown = list(registry.collect())
    for sample in (one for family in shown if family.name.endswith("_info") for one in family.samples):
        sample.labels.update(dict.fromkeys(sample.labels, ANY))  # the labels are the news
    return shown


def metrics() -> Iterator[str]:
    """A router's page. Then names in the source that are not on it: of a metric that is made elsewhere."""
    page = {shown_name(family): family for family in families()}
    yield from map(metric, page.values())
    yield from (f"elsewhere {name}" for name in literals(sources(), METRIC) if name not in (*page, *PACKAGES))


def shown_name(family: Metric) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def metric(family: Metric) -> str:
    labels: dict[str, dict[str, None]] = {}
    for name, value in (label for sample in family.samples for label in sample.labels.items()):
        labels.setdefault(name, {})[value] = None
    values = {name: found if name == "le" else sorted(found) for name, found in sorted(labels.items())}
    shown = (name if list(found) == [ANY] else f"{name}={'|'.join(found)}" for name, found in values.items())
    return f"{family.type} {shown_name(family)} {{{', '.join(shown)}}}"


def literals(trees: Trees, form: re.Pattern[str]) -> Iterator[str]:
    constants = (node.value for node in walk(trees) if isinstance(node, ast.Constant))
    return (value for value in constants if isinstance(value, str) and form.fullmatch(value))


def last_name(node: ast.AST) -> str:
    """`c` of a.b.c."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def paths(trees: Trees) -> Iterator[str]:
    """`Route(path, endpoint)`, where the endpoint is made in place or under a name in the same file. A path that is no
    text stands for those of all endpoints that generate."""
    for tree in trees:
        nodes = list(ast.walk(tree))
        named = {getattr(node.targets[0], "id", None): node.value for node in nodes if isinstance(node, ast.Assign)}
        for route in nodes:
            if isinstance(route, ast.Call) and last_name(route.func) == "Route":
                path, endpoint = route.args
                endpoint = named.get(getattr(endpoint, "id", ""), endpoint)
                assert isinstance(endpoint, ast.Call), f"what is {ast.unparse(route)}?"
                method = next(text for text in map(texts, endpoint.args) if text != UNKNOWN)
                shown = [api.table.path for api in APIS] if texts(path) == UNKNOWN else texts(path)
                yield from (" ".join((*method, one, *map(ast.unparse, endpoint.keywords))) for one in shown)


def texts(node: ast.expr) -> list[str]:
    """The texts that an expression may be, with {} for what only a run can tell."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(map("".join, zip(*map(texts, parts), strict=True)))]
        case ast.IfExp(body=one, orelse=other):
            return texts(one) + texts(other)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(pair) for pair in itertools.product(texts(left), texts(right))]
    return UNKNOWN


def events(trees: Trees) -> Iterator[str]:
    """Level, text and keys of each log line. A text may stand behind the kind that it is counted under."""
    for node in walk(trees):
        if isinstance(node, ast.FunctionDef) and any(map(adds_keys, ast.walk(node))):
            dicts = (inner for inner in ast.walk(node) if isinstance(inner, ast.Dict))
            yield from (f"key {texts(key)[0]}" for inner in dicts for key in inner.keys if key)
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name, found = last_name(node.func), [text for text in map(texts, node.args) if text != UNKNOWN]
        if name in TOLD_LATER:
            told = itertools.chain.from_iterable(map(texts, node.args[TOLD_LATER[name] :][:1]))
            yield from (f"later {text!r}" for text in told if text not in UNKNOWN)
        elif name in LEVELS if isinstance(node.func, ast.Attribute) else name == "log":
            keys = "".join(f" {keyword.arg or '**'}=" for keyword in node.keywords)
            yield from (f"{name} {text!r}{keys}" for text in (found or [UNKNOWN])[0])


def adds_keys(node: ast.AST) -> bool:
    """`log.write(level, text, keys)`: the log's own way to a line."""
    is_write = isinstance(node, ast.Attribute) and node.attr == "write"
    return is_write and last_name(node.value).endswith("log")


def variables(trees: Trees) -> Iterator[str]:
    """Names that look like a variable's, all names that the environment is asked for, and those of launch files."""
    yield from literals(trees, VARIABLE)
    for node in walk(trees):
        if isinstance(node, ast.Subscript) and last_name(node.value) == "environ":
            yield from texts(node.slice)
        if isinstance(node, ast.Call) and node.args and asks_environment(node.func):
            yield from (text for text in texts(node.args[0]) if text not in UNKNOWN)
    for file in (ROOT / "deploy").rglob("*"):
        if file.is_file() and file.suffix not in (".py", ".pyc", ".md", ".jsonl"):
            found = IN_SCRIPT.findall(file.read_text(encoding="utf-8"))
            yield from (f"launch {used or given}" for used, given in found)


def asks_environment(called: ast.expr) -> bool:
    owner = last_name(called.value) if isinstance(called, ast.Attribute) else ""
    return owner == "environ" or last_name(called) in ("getenv", "putenv")


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "flags": lambda: flags(make_parser()),
    "keys of --config files and cluster.toml": file_keys,
    "metrics": metrics,
    "HTTP paths": lambda: paths(sources()),
    "log events": lambda: events(sources()),
    "environment variables": lambda: variables(sources()),
}


def current(section: str) -> list[str]:
    return sorted(set(SECTIONS[section]()))


def committed() -> dict[str, list[str]]:
    parts = COMMITTED.read_text(encoding="utf-8").split("## ")[1:]
    return {part.splitlines()[0]: part.splitlines()[1:] for part in parts}


def difference(section: str) -> str:
    """Empty, or what was removed (-) and added (+)."""
    before, now = set(committed().get(section, [])), set(current(section))
    return "\n".join(f"{'-' if line in before else '+'} {line}" for line in sorted(before ^ now))


def rewrite() -> None:
    parts = ("\n".join((f"## {section}", *current(section), "")) for section in SECTIONS)
    COMMITTED.write_text(f"Made by `{REWRITE}`, never by hand.\n" + "".join(parts), "utf-8")


if __name__ == "__main__":
    rewrite()
