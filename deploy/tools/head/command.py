"""The command line of `baton head`. Its subcommands run in work.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

from deploy.hub.local_model import local_path
from deploy.tools.head.settings import AnswersConfig, EvaluateConfig, ExportConfig, ImportConfig, TrainConfig
from shared.config.flags import add_flags, given_values
from shared.config.load import load

DESCRIPTION = """\
baton head: a small network that drafts tokens, so that the model checks several at once (EAGLE-3, arXiv 2503.01840).

  baton head answers --invent 2000 --out answers.jsonl    prompts and answers by the model, as training data
  baton head train --answers answers.jsonl --work W       on a CPU or a GPU; a stopped run resumes
  baton head export --work W --out my-head                the public format; --spec-head my-head serves it
  baton head evaluate --head my-head                      tokens per verify step, on prompts of five kinds
  baton head import --source FOLDER --out my-head         a head made elsewhere for a Llama or Qwen model

A CPU in bfloat16 takes some hours for a head of a 135M model. --device accepts GPUs, but none was tried.
"""


@dataclass(frozen=True, slots=True)
class Word:
    config: type
    help: str


WORDS = {
    "answers": Word(AnswersConfig, "make training data: the model answers prompts, its own or yours"),
    "train": Word(TrainConfig, "train a head on answers; a stopped run resumes"),
    "evaluate": Word(EvaluateConfig, "measure a head's tokens per verify step, by kind of prompt"),
    "export": Word(ExportConfig, "write a trained head to a folder in the public format"),
    "import": Word(ImportConfig, "check a head made elsewhere, and write it under the canonical names"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(dest="word", metavar="WORD", required=True)
    for name, word in WORDS.items():
        made = words.add_parser(name, help=word.help, description=f"baton head {name}: {word.help}.")
        add_flags(made, word.config)


def run(args: argparse.Namespace) -> int:
    from deploy.tools.head.work import RUNNERS  # loads torch

    config: Any = load(WORDS[args.word].config, given_values(args))
    machine = config.machine
    local = replace(machine, model=local_path(machine.model, machine.offline))
    RUNNERS[args.word](replace(config, machine=local))
    return 0
