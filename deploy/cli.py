"""The `baton` command: check flags and settings, then run a tool or a daemon's app."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from baton_serve import __version__
from deploy import help_all
from deploy.cluster import admin, keys, local
from deploy.cluster.restart import start_again
from deploy.hub.local_model import with_local_model, with_local_text
from deploy.ray import command as on_ray
from deploy.tools import ask, cache, trace
from deploy.tools.certify import command as certify
from deploy.tools.doctor import settings as doctor
from deploy.tools.generate import options as generate
from deploy.tools.head import command as head
from deploy.tools.models import command as models
from deploy.tools.plan import options as plan
from deploy.tools.prove import command as prove
from deploy.tools.traffic import options as load_test
from shared.config import core_plan
from shared.config.flags import Values, add_flags, given_values
from shared.config.load import load
from shared.config.machine.home import prepare_home
from shared.config.models.model_path import resolve_model
from shared.config.processes import ClusterConfig, NodeProcessConfig, RouterProcessConfig
from shared.config.settings.options import flag_name
from shared.config.settings.removed import REMOVED
from shared.core import extras
from shared.core.errors import ConfigError
from shared.core.exit_codes import EXIT_CONFIG, start_again_as
from shared.core.orphan_guard import die_with_parent

OVERVIEW = """\
Serves a language model with prefill and decode on separate nodes, over an OpenAI-compatible API.

  baton up                 a router, a prefill and a decode node on this machine; with one GPU: one node for both
  baton up --decode 2      two decode nodes
  baton up FILE            another model: a .gguf file or a Hugging Face folder
  baton up org/name        a model from the Hugging Face hub, fetched once
  baton ask "..."          one question; `baton chat`: a conversation
"""

AFTERWARDS = """\
The same by hand, in three shells:

  baton router  --port 8000 --node-endpoint tcp://127.0.0.1:7001
  baton prefill --router tcp://127.0.0.1:7001
  baton decode  --router tcp://127.0.0.1:7001

Then: curl http://127.0.0.1:8000/v1/models. `baton COMMAND --help` explains the usual flags, `--help-all` all of them,
and how a TOML file sets them.
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that starts a router, a node or a cluster.

    `app`: the daemon's module. `hidden`: settings without a flag.
    """

    process: type
    help: str
    example: str
    app: str = ""
    hidden: frozenset[str] = frozenset()
    fixed_role: str = ""


# the flags that `--help` explains
USUAL_FLAGS = frozenset(
    {
        "prefill", "decode", "model", "dtype", "kv_dtype", "weight_dtype", "served_model_name", "max_context",
        "kv_bytes", "max_running", "device", "devices", "spec", "host", "port", "api_key_file", "keys", "router",
        "node_endpoint", "bind_host", "threads", "sampling_defaults",
    }
)  # fmt: skip
DEALT_BY_UP = frozenset(
    {"role", "node_id", "router", "routers_file", "bind_host", "bind_port", "ready_port", "node_endpoint", "router_id"}
    | {"kv_events_endpoint", "kv_events_topic"}
)

COMMANDS = {
    "up": Command(
        ClusterConfig,
        "a whole cluster on this machine, supervised, with one log",
        "baton up --prefill 1 --decode 2 --port 8000 --dtype float32",
        hidden=DEALT_BY_UP,
    ),
    "router": Command(
        RouterProcessConfig,
        "the HTTP API; nodes connect to it",
        "baton router --port 8000 --node-endpoint tcp://127.0.0.1:7001",
        app="router.app",
        hidden=frozenset({"borrow"}),
    ),
    "prefill": Command(
        NodeProcessConfig,
        "a node that computes prompts and hands their KV over",
        "baton prefill --router tcp://127.0.0.1:7001 --kv-bytes 1GiB",
        app="prefill_node.app",
        hidden=frozenset({"role"}),
        fixed_role="prefill",
    ),
    "decode": Command(
        NodeProcessConfig,
        "a node that takes over prompts and generates",
        "baton decode --router tcp://127.0.0.1:7001 --max-running 16",
        app="decode_node.app",
        hidden=frozenset({"role"}),
        fixed_role="decode",
    ),
}


@dataclass(frozen=True, slots=True)
class ToolCommand:
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def tool(help: str, module: ModuleType, run_in: str = "") -> ToolCommand:
    """`module`: has the tool's description, arguments and, without `run_in`, its `run`. `run_in`: the module that has
    `run`, imported late because it loads what other commands must not: torch and numpy before cores are assigned."""
    run = (lambda args: int(importlib.import_module(run_in).run(args))) if run_in else module.run
    return ToolCommand(help, module.DESCRIPTION, module.add_arguments, run)


TOOLS = {
    "ask": ToolCommand("ask one question in the terminal", ask.ASK, ask.add_ask_arguments, ask.ask),
    "chat": ToolCommand("a conversation in the terminal", ask.CHAT, ask.add_arguments, ask.chat),
    "admin": tool("show nodes, drain or restart them, change their role", admin),
    "trace": tool("record what the nodes' streams do, as one file for Perfetto", trace),
    "cache": tool("list and remove packed weights, which nodes keep on disk", cache),
    "doctor": tool("find faults of a cluster and this machine, and remedies", doctor, "deploy.tools.doctor.visit"),
    "generate": tool("answer a file of requests, offline; can resume", generate, "deploy.tools.generate.batch"),
    "head": tool("measure draft heads", head),
    "keys": tool("make, show, rotate and remove the keys of a cluster", keys),
    "load": tool("load any OpenAI-compatible server, and check its answers", load_test, "deploy.tools.load.harness"),
    "models": tool("what models would do here, before they are fetched", models),
    "plan": tool("find how many prefill and decode nodes to run", plan, "deploy.tools.plan.run"),
    "prove": tool("check token equality on your own model", prove),
    "replay": ToolCommand(
        "compute certified answers again, and compare", certify.REPLAY, certify.add_replay_arguments, certify.replay
    ),
    "verify": ToolCommand(
        "check certificates of answers, offline", certify.VERIFY, certify.add_verify_arguments, certify.verify
    ),
    "ray": tool("run a cluster on Ray: up, status, down", on_ray),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return 0 after an intended stop, 2 for an unusable configuration, 130 for Ctrl-C, else 1."""
    hear_sigterm()
    args = make_parser().parse_args(argv)
    if args.command is None:
        make_parser().print_help()
        return 0
    prepare_home()
    try:
        return run(args.command, args)
    except ConfigError as error:
        print(f"baton {args.command}: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    except ModuleNotFoundError as error:  # the machine may have only the router's packages
        package = extras.missing_package(error)
        if not package:
            raise
        print(f"baton {args.command}: {extras.missing(package, 'this')}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130


def hear_sigterm() -> None:
    """End a container's first process at SIGTERM, until a daemon has its own handler.

    Linux does not deliver a signal without a handler to such a process. SIGTERM ends other processes.
    """
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton",
        description=OVERVIEW,
        epilog=AFTERWARDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        add_command(commands, name, command)
    for name, tool in TOOLS.items():
        tool.add_arguments(add_parser(commands, name, tool.help, tool.description))
    return parser


def add_parser(commands: Any, name: str, help: str, description: str) -> Any:
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--help-all", action=HelpAll, nargs=0, help="show every flag, and exit")
    return parser


def add_command(commands: Any, name: str, command: Command) -> None:
    parser = add_parser(commands, name, command.help, f"baton {name}: {command.help}.\n\n  {command.example}")
    parser.usage = f"baton {name} [MODEL] [FLAG ...]"
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help="the same as --model (default: smollm2, which is shipped)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; flags override it")
    parser.add_argument("--parent-pid", type=int, default=0, help=argparse.SUPPRESS)
    add_flags(parser, command.process, command.hidden, USUAL_FLAGS)
    for gone in REMOVED:
        parser.add_argument(flag_name(gone), action=Removed, nargs="?", const=gone, help=argparse.SUPPRESS)


class HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        command = COMMANDS.get(parser.prog.split()[-1])
        if command is None:
            print(help_all.of_words(parser), end="")
        else:
            print(f"{parser.description}\n\n{help_all.of_settings(command.process, command.hidden)}", end="")
        parser.exit()


class Removed(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]} is gone: {REMOVED[self.const]}")


def run(name: str, args: argparse.Namespace) -> int:
    if name in TOOLS:
        return TOOLS[name].run(args)
    command = COMMANDS[name]
    fixed: Values = {"node": {"role": command.fixed_role}} if command.fixed_role else {}
    config: Any = load(command.process, with_model(given_values(args), args.positional_model), args.config, fixed)
    if args.parent_pid:
        die_with_parent(args.parent_pid)
    if isinstance(config, ClusterConfig):
        return local.run(config, os.getpid())
    code = run_daemon(command, config)
    role = start_again_as(code, command.fixed_role)
    if role is not None:
        start_again(role)
    return code


def with_model(given: Values, model: str | None) -> Values:
    """Take the model that was named without a flag. Raise ConfigError if --model names another one."""
    if model is None:
        return given
    named = given.get("model", {}).get("model", model)
    if named != model:
        raise ConfigError(f"two models are named, {model} and --model {named}: name one")
    return {**given, "model": {**given.get("model", {}), "model": model}}


def run_daemon(command: Command, config: RouterProcessConfig | NodeProcessConfig) -> int:
    """Check the settings, assign cores and thread counts, and only then import and run the app."""
    if isinstance(config, NodeProcessConfig) and not (config.parts.node.router or config.parts.node.routers_file):
        raise ConfigError(
            "--router is missing: give the router's node endpoint, e.g. --router tcp://127.0.0.1:7001, or "
            "--routers-file FILE"
        )
    if isinstance(config, NodeProcessConfig):
        config = replace(config, parts=with_local_model(config.parts))
        resolve_model(config.parts.model.model)
    else:
        config = with_local_text(config)
        resolve_model(config.model.model, with_weights=False)
    core_plan.apply(config.cores)
    return int(importlib.import_module(command.app).run(config))


if __name__ == "__main__":
    sys.exit(main())
