"""The command line of `baton head`. evaluate.py does the work."""

from __future__ import annotations

import argparse
from dataclasses import replace

from deploy.hub.local_model import local_path
from deploy.tools.head.settings import EvaluateConfig
from shared.config.flags import add_flags, given_values
from shared.config.load import load

DESCRIPTION = """\
baton head: a small network that drafts tokens, so that the model checks several at once (EAGLE-3, arXiv 2503.01840).

  baton head evaluate --head my-head    tokens per verify step, on prompts of five kinds
  baton up --spec eagle --spec-head my-head    drafts with it; a folder in the public format

Other tools train heads: docs/draft-heads.md names them.
"""
EVALUATE = "measure a head's tokens per verify step, by kind of prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="word", metavar="WORD", required=True)
    made = commands.add_parser("evaluate", help=EVALUATE, description=f"baton head evaluate: {EVALUATE}.")
    add_flags(made, EvaluateConfig)


def run(args: argparse.Namespace) -> int:
    from deploy.tools.head.evaluate import evaluate  # loads torch

    config = load(EvaluateConfig, given_values(args))
    target = config.target
    evaluate(replace(config, target=replace(target, model=local_path(target.model, target.offline))))
    return 0
