"""Answers of engines under test as their certified ones, and what a replay says of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from deploy.tools.certify.replay import Replayer, ReplayTask, ReplayVerdict
from router.certify.record import ShownAnswer
from router.certify.signing import public_pem, verified
from shared.node.assembly.fingerprint import make_fingerprint
from shared.node.records.core import NodeCore
from tests.support.cores.certified import choice_facts, keys_of, new_signer, shown_of
from tests.support.cores.core_rig import Job, Outcome, name_of, run_local

SIGNER = new_signer()
COUNTER = itertools.count(100)


def shown_answers(core: NodeCore, jobs: Sequence[Job], outcome: Outcome, **changes: Any) -> dict[str, ShownAnswer]:
    """What a client would hold of these streams, by their names. `changes`: of the fingerprint."""
    node = make_fingerprint(core.spec, core.pool.planes, core.pool.page_size, core.engine.worker.drafter, "other build")
    node = msgspec.structs.replace(node, **changes)
    shown = {}
    for job in jobs:
        name = name_of(job.request().key)
        facts = choice_facts(
            job.prompt,
            outcome.streams[name],
            node=node,
            sampling=job.sampling,
            seed=job.seed,
            finish_reason=outcome.ends[name].reason.value,
        )
        shown[name] = shown_of(SIGNER, facts)
    return shown


def certified(core: NodeCore, jobs: Sequence[Job], outcome: Outcome, **changes: Any) -> list[ReplayTask]:
    """What the replay reads of them."""
    return [task_of(one, name) for name, one in shown_answers(core, jobs, outcome, **changes).items()]


def write_log(folder: Path, shown: Iterable[ShownAnswer]) -> tuple[str, ...]:
    """Return the flags of `baton replay` for these answers."""
    log, key = folder / "log", folder / "public.pem"
    log.write_text("\n".join(json.dumps(msgspec.to_builtins(one)) for one in shown))
    key.write_text(public_pem(SIGNER.secret.public_key()))
    return ("--log", str(log), "--key", str(key))


def task_of(shown: ShownAnswer, name: str) -> ReplayTask:
    record = verified(shown.record, keys_of(SIGNER))
    shown.check_shown(record)
    assert shown.prompt_token_ids is not None
    sampling = record.sampling_params(shown.sampling)
    return ReplayTask(name, record, shown.prompt_token_ids, sampling, shown.salt_bytes, shown.token_ids)


def verdicts(core: NodeCore, tasks: Sequence[ReplayTask]) -> dict[str, ReplayVerdict]:
    found = {task.name: verdict for task, verdict in Replayer(core, core.pool.page_size).run(tasks)}
    assert found.keys() == {task.name for task in tasks}
    return found


def with_tokens(task: ReplayTask, ids: Sequence[int], **changes: Any) -> ReplayTask:
    """The same certificate as if these were the tokens."""
    facts = choice_facts(
        task.prompt_ids, ids, sampling=task.sampling, seed=task.record.seed, finish_reason=task.record.finish_reason
    )
    shown = shown_of(SIGNER, msgspec.structs.replace(facts, **changes))
    other = task_of(shown, task.name)
    kind: dict[str, Any] = {"nodes": task.record.nodes, "replays": task.record.replays}
    return replace(other, record=msgspec.structs.replace(other.record, **kind))


def forced(core: NodeCore, task: ReplayTask, ids: Sequence[int]) -> list[int]:
    """These tokens, and what the engine says behind them."""
    job = Job(next(COUNTER), tuple(task.prompt_ids), task.sampling, task.record.seed)
    request = job.request()
    request.output_ids = list(ids)
    core.submit(request)
    outcome = Outcome()
    outcome.streams[name_of(request.key)] = list(ids)
    return run_local(core, [], outcome=outcome).streams[name_of(request.key)]


def resumed(dead: NodeCore, heir: NodeCore, jobs: Sequence[Job], num_steps: int) -> Outcome:
    """Each answer's beginning is from `dead`, which ends after some steps. The rest is from `heir`."""
    outcome = Outcome()
    for job in jobs:
        dead.submit(job.request())
    for _ in range(num_steps):
        dead.step(block=True)
        outcome.take(dead)
    left = [job for job in jobs if name_of(job.request().key) not in outcome.ends]
    assert any(outcome.streams[name_of(job.request().key)] for job in left), "it died before or after all of its work"
    for job in left:
        request = job.request()
        request.output_ids = list(outcome.streams[name_of(request.key)])
        heir.submit(request)
    return run_local(heir, [], outcome=outcome)
