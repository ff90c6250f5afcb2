"""Runs `baton WORD ...` with a mark at each place that a request's first token comes by, in a file of its own.

    python -m tests.bench.first_token_marks FILE decode --router ...

A line is `NAME SECONDS` on the monotonic clock, which all processes of a machine share. Marks cost some microseconds
each and are set from outside: what is served knows nothing of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from deploy import cli

# module, its class, the method, what is marked: where it begins (<) and ends (>), and of which argument's type alone
Place = tuple[str, str, str, str]
ROUTER: tuple[Place, ...] = (
    ("router.http.connection", "Connection", "body", "body"),
    ("router.api.parse", "BodyParser", "parse", "parse"),
    ("router.text.chat_template", "JinjaTemplate", "render", "template"),
    ("router.text.guarded_encoder", "GuardedEncoder", "encode", "tokenize"),
    ("router.text.fast_tokenizer", "FastTokenizer", "encode", "tokenize"),
    ("router.dispatch.gateway", "Gateway", "open", "dispatch"),
    ("shared.wire.zeromq.link", "RouterLink", "send", "router_sends"),
    ("router.dispatch.gateway", "Gateway", "handle", "router_hears"),
    ("router.http.connection", "Connection", "write", "write"),
)
NODE: tuple[Place, ...] = (
    ("shared.node.node", "Node", "_generate", "node_hears"),
    ("shared.sched.scheduler", "Scheduler", "plan", "plan"),
    ("shared.engine.engine", "Engine", "launch", "launch"),
    ("shared.engine.worker", "Worker", "forward", "forward"),
    ("shared.engine.worker", "Worker", "sample", "sample"),
    ("shared.sched.scheduler", "Scheduler", "process", "process"),
    ("shared.wire.zeromq.link", "NodeLinks", "send", "node_sends"),
)
MESSAGES = ("router_sends", "router_hears", "node_sends")  # marked with the message's name


class Marks:
    """Writes each at once: a process that is killed has told all."""

    def __init__(self, sink: TextIO) -> None:
        self._sink = sink

    def set(self, name: str) -> None:
        self._sink.write(f"{name} {time.monotonic():.7f}\n")

    def around(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The method with marks `name<` and `name>`."""
        if inspect.isgeneratorfunction(method):

            @functools.wraps(method)
            def steps(*args: Any, **kwargs: Any) -> Iterator[Any]:
                self.set(f"{name}<")
                result = yield from method(*args, **kwargs)
                self.set(f"{name}>")
                return result

            return steps
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                self.set(f"{name}<")
                result = await method(*args, **kwargs)
                self.set(f"{name}>")
                return result

            return awaited

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            own = f"{name}.{message_name(args)}" if name in MESSAGES else name
            self.set(f"{own}<")
            result = method(*args, **kwargs)
            if result is not None or name != "plan":  # a plan of nothing is no step's
                self.set(f"{own}>")
            return result

        return called


def message_name(args: tuple[Any, ...]) -> str:
    """Of `send(self, peer, message)` and `handle(self, inbound)`."""
    found = args[2] if len(args) > 2 else getattr(args[1], "message", args[1])
    return type(found).__name__


def main(path: str, *argv: str) -> int:
    with open(path, "w", buffering=1, encoding="ascii") as sink:
        marks = Marks(sink)
        for module, owner, method, name in ROUTER if argv[0] == "router" else NODE:
            kind = getattr(importlib.import_module(module), owner)
            setattr(kind, method, marks.around(getattr(kind, method), name))
        return cli.main(list(argv))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
