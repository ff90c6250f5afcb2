"""Do one run of `baton replay`: read and check the certificates, then start the engine, then judge."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.hub.local_model import local_path
from deploy.tools.certify.prompt_file import prompts_in
from deploy.tools.certify.settings import ReplayConfig
from deploy.tools.certify.shown_files import printable, read_shown
from router.certify.record import AnswerRecord, BadCertificate, ShownAnswer, certified_ids
from router.certify.signing import read_public, read_record, verified
from shared.config import core_plan
from shared.config.processes import NodeParts, NodeProcessConfig
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from deploy.tools.certify.replay import Replayer, ReplayTask

EXIT_DIFFERENT, EXIT_UNTOLD = 1, 2


@dataclass(slots=True)
class ReplayCounts:
    equal: int = 0
    different: int = 0
    untold: int = 0
    tokens: int = 0

    @property
    def exit_code(self) -> int:
        return EXIT_DIFFERENT if self.different else EXIT_UNTOLD if self.untold else 0

    def __str__(self) -> str:
        return f"{self.equal} equal, {self.different} different, {self.untold} not computed"


def replay_files(
    config: ReplayConfig, files: Sequence[Path], log: Path | None, prompt: Path | None, keys: Sequence[Path]
) -> int:
    """Raise ConfigError for unusable files, and for another fingerprint than this engine's."""
    if not files and log is None:
        raise ConfigError("name a file with an answer, or --log FILE")
    model = local_path(config.model.model, config.hub.offline, library=config.model.model_library)
    config = replace(config, model=replace(config.model, model=model))
    named = [(str(file), one) for file in files for one in read_shown(file)]
    named += [(f"{log}, answer {n}", one) for n, one in enumerate(read_shown(log) if log is not None else [], 1)]
    known = read_public(keys) if keys else {}
    prompts = prompts_in(prompt, model) if prompt is not None else []
    core_plan.apply(config.cores)
    counts, tasks = ReplayCounts(), []
    for name, shown in named:
        try:
            tasks.append(task_of(name, shown, prompts, known))
        except BadCertificate as error:
            counts.different += 1
            print(f"{name}: NOT CERTIFIED: {printable(error.message)}")
    if not known:
        print("signatures are not checked, because no --key is given", file=sys.stderr)
    if tasks:
        with engine(config) as replayer:
            judge_all(replayer, tasks, counts, tells_equal=log is None)
    return counts.exit_code


def judge_all(replayer: Replayer, tasks: Sequence[ReplayTask], counts: ReplayCounts, *, tells_equal: bool) -> None:
    begun = time.monotonic()
    for task, verdict in replayer.run(tasks):
        counts.equal += verdict.is_equal is True
        counts.different += verdict.is_equal is False
        counts.untold += verdict.is_equal is None
        counts.tokens += task.count
        if tells_equal or verdict.text != "equal":
            print(f"{task.name}: {verdict.text} ({printable(task.record.answer)}, choice {task.record.choice})")
    seconds = time.monotonic() - begun
    speed = f"{counts.tokens / seconds:.0f} tokens/s" if seconds else "at once"
    print(f"{counts}: {counts.tokens} tokens in {seconds:.1f} s ({speed})")


def task_of(
    name: str, shown: ShownAnswer, prompts: Sequence[Sequence[int]], keys: dict[str, Ed25519PublicKey]
) -> ReplayTask:
    """Raise BadCertificate if something is wrong, and ConfigError if the prompt is missing."""
    from deploy.tools.certify.replay import ReplayTask  # loads torch

    record = verified(shown.record, keys) if keys else read_record(shown.record)[1]
    shown.check_shown(record)
    sampling = record.sampling_params(shown.sampling)
    prompt_ids = shown.prompt_token_ids
    if prompt_ids is None:
        prompt_ids = certified_prompt(name, record, shown.salt_bytes, prompts)
    return ReplayTask(name, record, prompt_ids, sampling, shown.salt_bytes, shown.token_ids)


def certified_prompt(name: str, record: AnswerRecord, salt: bytes, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the prompt of --prompt that the record has the digest of."""
    if not prompts:
        raise ConfigError(f'{name} shows no prompt ids: ask with "return_token_ids": true, or give --prompt FILE')
    for ids in prompts:
        if certified_ids(salt, "prompt", ids) == record.prompt:
            return list(ids)
    lengths = " or ".join(str(len(ids)) for ids in prompts)
    raise BadCertificate(
        f"--prompt is not the certified prompt of {record.prompt.count} tokens: it has {lengths} tokens here"
    )


@contextmanager
def engine(config: ReplayConfig) -> Iterator[Replayer]:
    """Yield a plain engine: one process, no drafts, no hand-offs."""
    from deploy.tools.certify.replay import Replayer
    from shared.node.build_core import build_core
    from shared.node.cores import NodeCores
    from shared.observe.log import Logger
    from shared.ranks.leader import RankProcesses

    parts = NodeParts(model=config.model, hub=config.hub, memory=config.memory, sched=config.sched)
    process = NodeProcessConfig(parts=parts, cores=config.cores)
    cores = NodeCores(config.cores, parts.parallel, "replay")
    try:
        log = Logger("replay", sys.stderr, level="warning", color=False)
        core = build_core(process, log, lambda: None, RankProcesses(process, "replay"), cores)
        try:
            if core.spec.has_encoder:  # a certificate does not hold its decoder's start
                raise ConfigError(f"{core.spec.name}: answers of encoder-decoder models are not computed again")
            yield Replayer(core, config.memory.page_size)
        finally:
            core.close()
    finally:
        cores.close()
