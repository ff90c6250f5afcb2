"""Do one run of `baton replay`: read and check the certificates, then start the engine, then judge."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.hub.local_model import local_path
from deploy.router_http import printable
from deploy.tools.certify.progress import ReplayProgress
from deploy.tools.certify.prompt_file import GivenPrompts, prompts_in
from deploy.tools.certify.settings import ReplayConfig
from deploy.tools.certify.shown_files import read_shown
from deploy.tools.certify.shown_text import Speller
from router.certify.record import BadCertificate, ShownAnswer
from router.certify.signing import read_public, read_record, verified
from router.text.load import load_text_model
from shared.config import core_plan
from shared.config.processes import NodeParts, NodeProcessConfig
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from deploy.tools.certify.replay import Replayer, ReplayTask


def replay_files(
    config: ReplayConfig, files: Sequence[Path], log: Path | None, prompt: Path | None, keys: Sequence[Path]
) -> int:
    """Raise ConfigError for unusable files. The log is read while it is replayed, so it may be of any length."""
    if not files and log is None:
        raise ConfigError("name a file with an answer, or --log FILE")
    model = local_path(config.model.model, config.hub.offline, library=config.model.model_library)
    config = replace(config, model=replace(config.model, model=model))
    progress = ReplayProgress(Console(stderr=True))
    named = [(str(file), one) for file in files for one in read_shown(file)]
    known = read_public(keys) if keys else {}
    if not known:
        print("signatures are not checked, because no --key is given", file=sys.stderr)
    prompts = prompts_in(prompt, model, config.text) if prompt is not None else None
    core_plan.apply(config.cores)
    speller = functools.cache(lambda: Speller(load_text_model(model, config.text).tokenizer))
    logged: Iterable[tuple[str, ShownAnswer]] = read_log(log, progress) if log is not None else ()
    tasks = tasks_of(itertools.chain(named, logged), prompts, known, speller, progress)
    first = next(tasks, None)
    if first is not None:
        with engine(config, first) as replayer:
            judge_all(replayer, itertools.chain((first,), tasks), progress, tells_equal=log is None)
    return progress.counts.exit_code


def read_log(log: Path, progress: ReplayProgress) -> Iterator[tuple[str, ShownAnswer]]:
    """Tell and count lines that can't be read: the last one may be half written."""

    def tell(text: str) -> None:
        progress.tell_fault(None, f"{log}: not computed: {printable(text)}")

    for number, shown in enumerate(read_shown(log, tell), 1):
        yield f"{log}, answer {number}", shown


def judge_all(replayer: Replayer, tasks: Iterable[ReplayTask], progress: ReplayProgress, *, tells_equal: bool) -> None:
    with progress.watching():
        for task, verdict in replayer.run(tasks):
            progress.counts.add(verdict.is_equal)
            progress.counts.tokens += task.count
            if tells_equal or verdict.text != "equal":
                record = task.record
                progress.tell(
                    f"{task.name}: {printable(verdict.text)} ({printable(record.answer)}, choice {record.choice})"
                )
            progress.pass_one()


def tasks_of(
    named: Iterable[tuple[str, ShownAnswer]],
    prompts: GivenPrompts | None,
    keys: Mapping[str, Ed25519PublicKey],
    speller: Callable[[], Speller],
    progress: ReplayProgress,
) -> Iterator[ReplayTask]:
    """Tell and count answers that are wrong, or can't be computed.

    `speller`: is asked once a text is shown with its tokens.
    """
    for name, shown in named:
        own = speller() if shown.text is not None and shown.token_ids is not None else None
        try:
            task = task_of(name, shown, prompts, keys)
            if own is not None:
                own.check_text(shown, task.record, task.prompt_ids)
            yield task
        except BadCertificate as error:
            progress.tell_fault(False, f"{name}: NOT CERTIFIED: {printable(error.message)}")
        except ConfigError as error:
            progress.tell_fault(None, f"{name}: not computed: {error.message}")


def task_of(
    name: str, shown: ShownAnswer, prompts: GivenPrompts | None, keys: Mapping[str, Ed25519PublicKey]
) -> ReplayTask:
    """Raise BadCertificate if something is wrong, and ConfigError if the prompt is missing."""
    from deploy.tools.certify.replay import ReplayTask  # loads torch

    record = verified(shown.record, keys) if keys else read_record(shown.record)[1]
    shown.check_shown(record)
    sampling = record.sampling_params(shown.sampling)
    prompt_ids = shown.prompt_token_ids if prompts is None else prompts.certified(record, shown.salt_bytes)
    if prompt_ids is None:
        raise ConfigError('it shows no prompt ids: ask with "return_token_ids": true, or give --prompt FILE')
    return ReplayTask(name, record, prompt_ids, sampling, shown.salt_bytes, shown.token_ids)


@contextmanager
def engine(config: ReplayConfig, first: ReplayTask) -> Iterator[Replayer]:
    """Yield a plain engine in the first task's formats: one process, no drafts, no hand-offs."""
    from deploy.tools.certify.formats import with_certified_formats
    from deploy.tools.certify.replay import Replayer
    from shared.node.assembly.build_core import build_core
    from shared.node.machine.cores import NodeCores
    from shared.observe.log import Logger
    from shared.ranks.leader import RankProcesses

    config = with_certified_formats(config, first.record.nodes[0])
    parts = NodeParts(model=config.model, hub=config.hub, memory=config.memory, sched=config.sched)
    process = NodeProcessConfig(parts=parts, cores=config.cores)
    cores = NodeCores(config.cores, parts.parallel, "replay")
    try:
        log = Logger("replay", sys.stderr, level="warning")
        core = build_core(process, log, lambda: None, RankProcesses(process, "replay"), cores)
        try:
            if core.spec.has_encoder:  # a certificate does not hold its decoder's start
                raise ConfigError(f"{core.spec.name}: answers of encoder-decoder models are not computed again")
            yield Replayer(core, config.memory.page_size)
        finally:
            core.close()
    finally:
        cores.close()
