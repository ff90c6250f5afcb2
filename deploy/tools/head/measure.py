"""Measure a head's acceptance by kind of prompt, over the target's greedy answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from deploy.tools.head.answers import prompt_ids
from deploy.tools.head.data import TrainingAnswer
from deploy.tools.head.evaluate import HeadAcceptance, acceptance
from deploy.tools.head.generate import Generator, Task
from deploy.tools.head.network import HeadNet, Weights
from deploy.tools.head.store import FeatureTrace
from deploy.tools.head.target import TargetNet
from router.text.interface import TextModel
from shared.core.errors import ConfigError

Tensor = torch.Tensor
OWN_PROMPTS = Path(__file__).with_name("held_out_prompts.jsonl")
SHORTEST = 3  # fewer ids leave no room for a draft
ALL = "all"


def read_kinds(path: Path) -> list[tuple[str, str]]:
    """Return each line's (kind, prompt). Raise ConfigError for an invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [(str(raw["kind"]), str(raw["prompt"])) for raw in map(json.loads, filter(None, lines))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"can't read kinds and prompts from {path}: {error!r}") from error


def greedy_answers(generator: Generator, text: TextModel, prompts: Sequence[str], limit: int) -> list[TrainingAnswer]:
    tasks = [Task(n, prompt_ids(text, prompt), 0.0, limit) for n, prompt in enumerate(prompts)]
    found = {task.key: TrainingAnswer(task.prompt, tuple(made), 0.0) for task, made in generator.run(tasks)}
    return [found[n] for n in range(len(tasks))]


def traces_of(target: TargetNet, answers: Sequence[TrainingAnswer]) -> list[FeatureTrace]:
    made = []
    for one in answers:
        if len(one.answer) >= SHORTEST:
            features = target.features([one.ids])
            made.append(FeatureTrace(torch.tensor(one.ids), len(one.prompt), True, features.aux, features.final))
    return made


def by_kind(
    net: HeadNet, weights: Weights, draft_ids: Tensor, kinds: Mapping[str, Sequence[FeatureTrace]], steps: int
) -> dict[str, HeadAcceptance]:
    every = [trace for traces in kinds.values() for trace in traces]
    return {name: acceptance(net, weights, draft_ids, traces, steps) for name, traces in (*kinds.items(), (ALL, every))}


def table(found: Mapping[str, HeadAcceptance]) -> str:
    steps = len(next(iter(found.values())).by_step)
    head = [f"{'kind':<14}{'tokens':>8}", *(f"{n + 1:>7}" for n in range(steps)), "   right drafts, first to last"]
    lines = [f"{'':22}tokens per verify with this many drafts in a row", "".join(head)]
    for name, one in found.items():
        rates = "".join(f"{value:7.2f}" for value in one.tokens_per_verify)
        shares = "".join(f"{value:7.0%}" for value in one.by_step)
        lines.append(f"{name:<14}{one.tokens:>8}{rates}   {shares}")
    return "\n".join(lines)
