"""`baton ask` and `baton chat`: one question, or a conversation, in the terminal. Answers appear as they come.

If no router answers, a cluster is started for the command's own use, and ends with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from deploy.router_url import DEFAULT_URL, USUAL, no_answer, parse_url
from shared.config.models import shipped_model
from shared.core.errors import ConfigError

ASK = """\
baton ask: one question, and its answer as it comes.

  baton ask "What is the capital of France?"        the server of `baton up`; without one, a cluster just for this
  baton ask --url https://host "..."                another server; any that speaks OpenAI's chat API
  git diff | baton ask "What changed here?" -       a last word `-` adds the standard input
  baton ask --model org/name "..."                  with a server: one of its models; without one: this model is loaded
"""
CHAT = """\
baton chat: a conversation in the terminal. Ctrl-C ends an answer, Ctrl-D the conversation.

  baton chat
  baton chat --system "You are a patient teacher." --temperature 0.3
"""
FIRST_ANSWER_S = 10.0  # longest wait for a server to say which models it has
LONGEST_SILENCE_S = 600.0  # between two pieces of an answer, the first included
SHOWN_EVERY_S = 3.0
MOST_WAIT_S = 24 * 3600.0  # a large model is fetched first; Ctrl-C ends it
MOST_START_S = 3600.0  # the most that `baton up` takes; fetching does not count
PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help=f"a server ({USUAL}; if none is there, a cluster of its own)")
    parser.add_argument("--model", metavar="MODEL", help=f"(default: the server's first, or {shipped_model.NAME})")
    parser.add_argument("--system", metavar="TEXT", help="how the model should behave")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: the server's)")
    parser.add_argument("--temperature", type=float, metavar="X", help="(default: the server's)")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the server's key")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="CA of the server's certificate, if not a public CA")


def add_ask_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="QUESTION", help="a last word `-` adds the standard input")
    add_arguments(parser)


@dataclass
class ChatSession:
    """A conversation with a model. `open` posts a body and yields the streamed answer."""

    open: Callable[[dict[str, Any]], contextlib.AbstractContextManager[HTTPResponse]]
    params: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str) -> Iterator[str]:
        """Yield the answer's pieces. What was yielded stays in the conversation, with the question; nothing else does.

        Raise ConfigError if the server refuses, fails or breaks off."""
        said = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            with self.open({**self.params, "messages": said, "stream": True}) as response:
                for piece in pieces(response):
                    answer += piece
                    yield piece
        except (OSError, HTTPException) as error:
            raise ConfigError(f"the server is gone: {error}") from None
        finally:
            if answer:
                self.messages = [*said, {"role": "assistant", "content": answer}]


def pieces(response: HTTPResponse) -> Iterator[str]:
    from deploy.router_http import error_message

    if response.status != 200:
        body = response.read()
        why = error_message(body) or body.decode("utf-8", "replace")[:500]
        raise ConfigError(f"the server answered {response.status}: {why}")
    is_whole = False
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if error := event.get("error"):
            raise ConfigError(f"the answer broke off: {error.get('message') if isinstance(error, dict) else error}")
        for choice in event.get("choices", ()):
            if text := (choice.get("delta") or {}).get("content"):
                yield text
            is_whole = is_whole or bool(choice.get("finish_reason"))
    if not is_whole:
        raise ConfigError("the answer broke off: the connection ended")


def ask(args: argparse.Namespace) -> int:
    words = args.words
    if words[-1] == "-":
        words = [*words[:-1], "\n\n" + sys.stdin.read()]
    question = " ".join(words).strip()
    if not question:
        raise ConfigError("the question is empty")
    if is_url(args.words[-1]) and args.url is None:
        raise ConfigError(f"a server is named by --url {args.words[-1]}")
    with talk_of(args) as talk:
        return show(talk.say(question))


def is_url(word: str) -> bool:
    return word.startswith(("http://", "https://")) and " " not in word


def chat(args: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then has a history and editing)
    with talk_of(args) as talk:
        while True:
            try:
                line = input(PROMPT if sys.stdin.isatty() else "")
            except EOFError:
                return 0
            if line.strip():
                try:
                    show(talk.say(line))
                except ConfigError as error:  # the next line may be answered
                    print(f"baton chat: {error.message}", file=sys.stderr)
                except KeyboardInterrupt:  # ends the answer, not the conversation
                    pass


def show(answer: Iterator[str]) -> int:
    """Write the pieces at once. The line ends in any case, unless nothing reads it any more."""
    try:
        try:
            for piece in answer:
                print(piece, end="", flush=True)
        finally:
            print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        raise SystemExit(0) from None
    return 0


@contextlib.contextmanager
def talk_of(args: argparse.Namespace) -> Iterator[ChatSession]:
    """Yield a conversation with the named server, with the one of `baton up`, or with a cluster of our own."""
    from deploy.cluster.own_cluster import own_cluster
    from deploy.router_http import UNREACHABLE, RouterHttp, read_api_key

    key = read_api_key(args.api_key_file)
    http = RouterHttp(parse_url(args.url or DEFAULT_URL), key, args.ca)
    with contextlib.ExitStack() as stack:
        try:
            model = named(args.model, http)
        except UNREACHABLE as error:
            # a server that is slow is there: another model would make it slower
            if args.url is not None or not isinstance(error, ConnectionRefusedError):
                raise no_answer(http.url, error) from None
            model = args.model or shipped_model.NAME
            print(
                f"no server at {http.url}: starting {model} here, just for this. `baton up {model}` keeps one running.",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-ask-"))) / "up.log"
            with shown_start(log):
                flags = ("--model", model, "--start-timeout-s", str(MOST_START_S))
                base = stack.enter_context(own_cluster(flags, log, timeout_s=MOST_WAIT_S))
            http = RouterHttp(parse_url(base), "")
            model = named(None, http)
        params: dict[str, Any] = {"model": model}
        params |= {} if args.max_tokens is None else {"max_tokens": args.max_tokens}
        params |= {} if args.temperature is None else {"temperature": args.temperature}
        system = [{"role": "system", "content": args.system}] if args.system else []
        yield ChatSession(
            lambda body: http.opened("POST", "/v1/chat/completions", body, LONGEST_SILENCE_S), params, list(system)
        )


@contextlib.contextmanager
def shown_start(log: Path) -> Iterator[None]:
    """Print the log's newest line every few seconds: a first start compiles kernels, a large model takes minutes."""
    over = threading.Event()

    def show_lines() -> None:
        last = ""
        while not over.wait(SHOWN_EVERY_S):
            lines = log.read_text(errors="replace").split("\n") if log.exists() else []
            line = lines[-2] if len(lines) > 1 else ""
            print("  " + (line if line != last else "..."), file=sys.stderr, flush=True)
            last = line

    thread = threading.Thread(target=show_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def models_of(http: Any) -> list[str]:
    from deploy.router_http import error_message

    status, body = http.send("GET", "/v1/models", None, FIRST_ANSWER_S)
    if status == 401:
        raise ConfigError(f"{http.url} needs its key: give --api-key-file")
    if why := error_message(body):  # such as a port that speaks HTTPS only
        raise ConfigError(f"{http.url} answered {status}: {why}")
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{http.url} is not a server of models: it answered {status} to /v1/models") from None


def named(wanted: str | None, http: Any) -> str:
    """Return the model to ask for. Raise ConfigError if the server does not have it."""
    models = models_of(http)
    if not models:
        raise ConfigError(f"{http.url} has no model")
    if wanted is None:
        return models[0]
    if wanted not in models:
        raise ConfigError(f"{http.url} has no model {wanted!r}; it has {', '.join(models)}")
    return wanted
