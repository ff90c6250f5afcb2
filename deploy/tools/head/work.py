"""Run the subcommands of `baton head`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deploy.tools.head import chart
from deploy.tools.head.answers import InventedPrompt, answer, invent, prompt_ids, read_prompts
from deploy.tools.head.generate import Generator
from deploy.tools.head.measure import OWN_PROMPTS, by_kind, greedy_answers, read_kinds, table, traces_of
from deploy.tools.head.public import import_head, write_head
from deploy.tools.head.settings import (
    AnswersConfig,
    EvaluateConfig,
    ExportConfig,
    ImportConfig,
    TrainConfig,
    TrainingMachine,
)
from deploy.tools.head.start import head_config
from deploy.tools.head.target import TargetNet
from deploy.tools.head.train import Progress, Run, head_net
from router.text.load import load_text_model
from shared.config.model_path import resolve_head, resolve_model
from shared.core.errors import ConfigError
from shared.model.eagle_file import HeadFolder, tensor_shapes
from shared.model.interface import Model
from shared.model.load import load_model
from shared.model.opened import DTYPES, LoadOptions, open_model
from shared.model.weights import TensorSource

LONGEST_PROMPT = 1024
EVERY_S = 5.0  # seconds between lines of progress


def load_on(machine: TrainingMachine) -> Model:
    return load_model(machine.model, LoadOptions(machine.dtype, threads=machine.threads), machine.device)


def answers(config: AnswersConfig) -> None:
    settings, out = config.data, Path(config.data.out)
    text = load_text_model(config.machine.model)
    model_device = torch.device(config.machine.device)
    torch.set_num_threads(config.machine.threads)
    model = load_on(config.machine)
    longest = min(model.spec.max_context, LONGEST_PROMPT + settings.max_new)
    with closing(Generator(model, settings.rows, longest, settings.data_seed, model_device)) as generator:
        prompts = read_prompts(Path(settings.prompts)) if settings.prompts else []
        if settings.invent:
            prompts += invent(generator, text, invented_path(out), settings.invent, Ticker("prompts", settings.invent))
        wanted = list(dict.fromkeys(prompt_ids(text, prompt) for prompt in prompts))
        invented = InventedPrompt(settings.temperature_list(), settings.max_new)
        answer(generator, wanted, invented, out, Ticker("answers", len(wanted)))


def invented_path(out: Path) -> Path:
    return out.with_name(out.name.removesuffix(".jsonl") + ".invented.jsonl")


def train(config: TrainConfig) -> None:
    source, target = open_target(config.machine)
    run = Run(source, config.recipe, config.run, target)
    print(f"{run.total:,} answer tokens to train on, {run.learner.position.tokens:,} done", flush=True)
    ticker = Ticker("answer tokens", run.total)

    def told(progress: Progress) -> None:
        losses = " ".join(f"{value:.2f}" for value in progress.losses)
        ticker(progress.tokens, f"loss {losses}  right {progress.hits[0]:.0%}")
        if run.learner.position.updates % config.run.check_every == 0:
            draw(run.work)

    run.go(told)
    draw(run.work)
    print(chart.acceptance_table(chart.read_curve(run.work / "curve.jsonl")))


def draw(work: Path) -> None:
    curve = chart.read_curve(work / "curve.jsonl")
    (work / "loss.svg").write_text(chart.svg("Loss", chart.loss_lines(curve)), encoding="utf-8")
    accepted = chart.svg("Tokens per verify on held-out answers", chart.acceptance_lines(curve))
    (work / "acceptance.svg").write_text(accepted, encoding="utf-8")


def evaluate(config: EvaluateConfig) -> None:
    settings, machine = config.test, config.machine
    source, target = open_target(machine)
    head = HeadFolder(resolve_head(settings.head, machine.model), source.config)
    target.aux_layers = head.config.aux_layers
    weights = {name: head.tensor(name).to(target.device, torch.float32) for name in tensor_shapes(head.config)}
    text = load_text_model(machine.model)
    asked = read_kinds(Path(settings.prompts) if settings.prompts else OWN_PROMPTS)
    model = load_on(machine)
    longest = min(model.spec.max_context, LONGEST_PROMPT + settings.max_new)
    with closing(Generator(model, settings.rows, longest, 0, target.device)) as generator:
        made = greedy_answers(generator, text, [prompt for _, prompt in asked], settings.max_new)
    kinds = {kind: [one for (name, _), one in zip(asked, made, strict=True) if name == kind] for kind, _ in asked}
    traces = {kind: traces_of(target, ones) for kind, ones in kinds.items()}
    found = by_kind(head_net(head.config, target), weights, head.draft_ids, traces, settings.chain)
    print(table(found))
    print(json.dumps({kind: asdict(one) for kind, one in found.items()}))


def export(config: ExportConfig) -> None:
    work, out = Path(config.export.work), Path(config.export.out)
    target = open_model(model_path(config.machine)).config
    try:
        with safe_open(work / "checkpoint.safetensors", "pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            said = file.metadata()
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"can't read {work / 'checkpoint.safetensors'}: {error}") from error
    shape = head_config(target, len(found["draft_ids"]))
    weights = {name: found[f"weight.{name}"] for name in tensor_shapes(shape)}
    weights["fc.weight"] = weights["fc.weight"] / found["scale"]
    write_head(out, shape, weights, found["draft_ids"], DTYPES[config.machine.dtype])
    recipe = {"recipe": json.loads(said["recipe"]), "position": json.loads(said["position"])}
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:.1f} MB")


def import_(config: ImportConfig) -> None:
    target = open_model(model_path(config.machine)).config
    out = Path(config.source.out)
    head = import_head(Path(config.source.source), out, target, DTYPES[config.machine.dtype])
    print(f"{out}: a head for {target.name} that drafts {head.draft_vocab_size:,} of {target.vocab_size:,} ids")


RUNNERS: Mapping[str, Callable[[Any], None]] = {
    "answers": answers,
    "train": train,
    "evaluate": evaluate,
    "export": export,
    "import": import_,
}


def model_path(machine: TrainingMachine) -> Path:
    path = resolve_model(machine.model).path
    if path is None:
        raise ConfigError(f"--model {machine.model} has no hidden states for a head to read")
    return path


def open_target(machine: TrainingMachine) -> tuple[TensorSource, TargetNet]:
    torch.set_num_threads(machine.threads)
    source = open_model(model_path(machine))
    device = torch.device(machine.device)
    return source, TargetNet(source, DTYPES[machine.dtype], device, source.config.max_context)


class Ticker:
    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._first: tuple[float, int] | None = None
        self._last = 0.0

    def __call__(self, done: int, more: object = "") -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)
        if now - self._last < EVERY_S and done < self._total:
            return
        self._last = now
        rate = (done - self._first[1]) / max(now - self._first[0], 1e-9)
        left = f"{(self._total - done) / rate / 60:.0f} min left" if rate > 0 else ""
        print(f"{done:,} of {self._total:,} {self._what}  {rate:.0f}/s  {left}  {more}", file=sys.stderr, flush=True)
