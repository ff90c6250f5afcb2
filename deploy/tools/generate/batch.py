"""Do one run of `baton generate`, from flags to exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from deploy.cluster.own_cluster import own_cluster
from deploy.router_http import RouterHttp, read_api_key
from deploy.router_url import Url, parse_url, url_of
from deploy.tools.concurrently import concurrently, every
from deploy.tools.generate.asker import BatchClient, RetryLimits, line_of_bad
from deploy.tools.generate.http_client import HttpClient
from deploy.tools.generate.line_file import BatchStopped, LineFile, OutputLine, answered_in
from deploy.tools.generate.lines import BadLine, BatchRequest, is_answered, read_lines, survey
from deploy.tools.generate.stop_signals import StopSignals
from deploy.tools.generate.tally import Tally, progress_text, summary_text
from shared.config.models import shipped_model
from shared.core.errors import ConfigError

REDRAW_S = 0.5
EXIT_FAILED = 1
SIGNAL_STATUS = 128  # exit status: this plus the signal's number, as in a shell
UNAUTHORIZED = 401
MAX_CONCURRENCY = 4096


@dataclass(frozen=True, slots=True)
class BatchPaths:
    requests: Path
    answers: Path
    errors: Path


@dataclass(frozen=True, slots=True)
class AskedServer:
    url: Url
    api_key: str
    ca: Path | None


def run(args: argparse.Namespace) -> int:
    paths = paths_of(args)
    check(args)
    with contextlib.closing(LineFile(paths.answers)) as answers, errors_file(paths.errors) as errors:
        answered = answered_in(answers)
        if answers.drop_torn_line():
            print(f"{paths.answers}: a crash cut its last line, which is asked again", file=sys.stderr)
        found = survey(paths.requests, answered)
        errors.clear()
        results = BatchResults(answers, errors, Tally(found.num_lines, found.num_answered))
        with StopSignals() as stop:
            try:
                seconds = answer_all(args, paths, answered, results, stop)
            except (KeyboardInterrupt, asyncio.CancelledError):
                tell_stopped(paths, results.tally, "stopped")
                return SIGNAL_STATUS + stop.number
            except BatchStopped as error:
                tell_stopped(paths, results.tally, error.message)
                return EXIT_FAILED
        return finish(args, paths, results.tally, seconds)


def paths_of(args: argparse.Namespace) -> BatchPaths:
    requests: Path = args.file
    answers = args.out or requests.with_name(f"{requests.stem}.out.jsonl")
    errors = args.errors or answers.with_name(f"{answers.stem.removesuffix('.out')}.errors.jsonl")
    if not requests.is_file():
        raise ConfigError(f"{requests}: there is no such file")
    if len({one.resolve() for one in (requests, answers, errors)}) < 3:
        raise ConfigError("requests, --out and --errors must be three different files")
    return BatchPaths(requests, answers, errors)


def check(args: argparse.Namespace) -> None:
    if not 1 <= args.concurrency <= MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency is {args.concurrency}; it must be from 1 to {MAX_CONCURRENCY}")
    if args.retries < 0:
        raise ConfigError(f"--retries is {args.retries}; it must be 0 or more")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout is {args.timeout:g}; it must be above 0")
    if url_of(args) is not None and (args.model or args.up):
        raise ConfigError("--model and --up are for the command's own cluster: leave out either these flags or the URL")


@contextlib.contextmanager
def errors_file(path: Path) -> Iterator[LineFile]:
    """Yield the file of errors. Remove it if no line failed."""
    file = LineFile(path)
    try:
        for _ in file.lines():  # raises ConfigError for another program's file, before we change it
            pass
        yield file
    finally:
        file.close(keep_empty=False)


def answer_all(
    args: argparse.Namespace, paths: BatchPaths, answered: dict[bytes, str], results: BatchResults, stop: StopSignals
) -> float:
    """Ask for all remaining answers. Return the seconds that this took; 0.0 if no line remained."""
    if not results.tally.num_left:
        return 0.0
    lines = (line for line in read_lines(paths.requests) if not is_answered(line, answered))
    with server_of(args) as server:
        patience = RetryLimits(args.retries, args.timeout)

        async def ask_all() -> None:
            stop.watch_current_task()
            client = HttpClient(server.url, server.api_key, server.ca)
            try:
                async with shown(results.tally, Console(stderr=True), quiet=args.quiet):
                    workers = min(args.concurrency, results.tally.num_left)
                    await run_all(lines, BatchClient(client, server.url, patience), results, workers)
            finally:
                stop.unwatch()
                await client.close()

        begun = time.monotonic()
        asyncio.run(ask_all())
        return time.monotonic() - begun


@contextlib.contextmanager
def server_of(args: argparse.Namespace) -> Iterator[AskedServer]:
    """Yield the given router once it answers. Without one, yield our own cluster, which ends with the `with` block."""
    url = url_of(args)
    if url is not None:
        server = AskedServer(url, read_api_key(args.api_key_file), args.ca)
        require_answer(server)
        yield server
        return
    model = args.model or shipped_model.NAME
    if not args.quiet:
        print(f"starting {model} on this machine ...", file=sys.stderr, flush=True)
    flags = ("--model", model, *up_flags(args.up))
    with (
        tempfile.TemporaryDirectory(prefix="baton-generate-") as folder,
        own_cluster(flags, Path(folder) / "up.log") as base,
    ):
        yield AskedServer(parse_url(base), "", None)


def up_flags(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--up: {error}") from None


def require_answer(server: AskedServer) -> None:
    """Raise ConfigError without a usable answer."""
    status, _ = RouterHttp(server.url, server.api_key, server.ca).require_answer("GET", "/v1/models")
    if status == UNAUTHORIZED:
        raise ConfigError(f"{server.url} needs its key: give --api-key-file")


def tell_stopped(paths: BatchPaths, tally: Tally, why: str) -> None:
    done = tally.num_before + tally.num_ok
    print(
        f"\n{why}: {done:,} of {tally.num_lines:,} lines have an answer in {paths.answers}. "
        "The same command goes on from there.",
        file=sys.stderr,
    )


def finish(args: argparse.Namespace, paths: BatchPaths, tally: Tally, seconds: float) -> int:
    if not args.quiet:
        print(f"{paths.answers}: {summary_text(tally, seconds)}")
    if not tally.num_failed:
        return 0
    lines = "line has" if tally.num_failed == 1 else "lines have"
    print(
        f"{tally.num_failed:,} {lines} no answer; {paths.errors} says why; the same command tries them again",
        file=sys.stderr,
    )
    return EXIT_FAILED


@contextlib.asynccontextmanager
async def shown(tally: Tally, console: Console, *, quiet: bool) -> AsyncIterator[None]:
    """Show a line of progress, if the output is a terminal."""
    if quiet or not console.is_terminal:
        yield
        return
    async with concurrently(redraw(tally, console)):
        yield


async def redraw(tally: Tally, console: Console) -> None:
    begun = time.monotonic()
    with console.status(progress_text(tally, 0.0)) as status:
        await every(REDRAW_S, lambda: status.update(progress_text(tally, time.monotonic() - begun)))


@dataclass(frozen=True, slots=True)
class BatchResults:
    answers: LineFile
    errors: LineFile
    tally: Tally

    def take_line(self, line: OutputLine) -> None:
        (self.answers if self.tally.take_line(line) else self.errors).append(line)


async def run_all(
    lines: Iterator[BatchRequest | BadLine], asker: BatchClient, results: BatchResults, concurrency: int
) -> None:
    """Ask for `concurrency` lines at a time, and write answers as they arrive. The first error ends all workers."""

    async def work() -> None:
        for line in lines:
            results.take_line(line_of_bad(line) if isinstance(line, BadLine) else await asker.answer(line))

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
