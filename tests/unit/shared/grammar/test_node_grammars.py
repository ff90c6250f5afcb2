"""Whether a node follows grammars, and what it says if it does not: to its log, its routers and their clients."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shared.config.processes import NodeParts
from shared.config.settings.settings import ModelConfig, ParallelConfig
from shared.core.errors import InvalidRequest
from shared.grammar.grammars import Grammars, NoGrammars
from shared.model.loading.load import load_model
from shared.node.assembly.build_model import make_grammars
from shared.observe.log import Logger
from shared.wire.fitting import NO_GRAMMAR
from tests.support.cores.core_rig import CoreKnobs, draw_jobs, make_core, some_follow_grammars
from tests.support.models.library_families import VOCAB, write_tokenizer
from tests.support.models.tiny_llama import write_tiny_llama

SPEC = load_model("hashlm").spec
ROWS = VOCAB + 20  # of an embedding that the tokenizer does not fill


def made(
    model: Path | str, *, rows: int = ROWS, pp: int = 1, encodes: bool = False
) -> tuple[Grammars | NoGrammars, str]:
    """Return the node's grammars, and its log."""
    said = io.StringIO()
    parts = NodeParts(model=ModelConfig(model=str(model)), parallel=ParallelConfig(pp=pp))
    spec = replace(SPEC, vocab_size=rows, has_encoder=encodes)
    found = make_grammars(parts, spec, Logger("d0", said), lambda: None)
    found.close()
    return found, said.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path, vocab=ROWS)
    write_tokenizer(tmp_path)
    return tmp_path


def lose_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def lose_ends(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"eos_token_id": 1', '"eos_token_id": null'))


def change_nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "given", "why"),
    [
        (change_nothing, {"pp": 2}, "nodes with --pp have none"),
        (change_nothing, {"encodes": True}, "models with an encoder have none"),
        (lose_tokenizer, {}, "the model's tokenizer can't be read (the nodes' logs say why)"),
        (lose_ends, {}, "no token ends this model's answers"),
        (change_nothing, {"rows": 500}, f"the model has 500 tokens, and its tokenizer {ROWS}"),
    ],
)
def test_a_node_without_grammars_says_why(
    change: Callable[[Path], None], given: dict[str, int], why: str, folder: Path
) -> None:
    change(folder)
    found, said = made(folder, **given)
    assert found == NoGrammars(why) and found.version == f"{NO_GRAMMAR}: {why}"
    assert "no structured output" in said and str(folder) not in found.version
    assert f"{folder} has no tokenizer.json" in said if change is lose_tokenizer else why in said


def test_a_node_without_grammars_refuses_one_with_the_reason() -> None:
    core = make_core(CoreKnobs(), grammars=NoGrammars("nodes with --pp have none"))
    (job,) = some_follow_grammars(draw_jobs(random.Random(2), 1))
    with pytest.raises(InvalidRequest, match="^this node follows no grammars: nodes with --pp have none$"):
        core.scheduler.intake.constrain(job.request())
    assert core.scheduler.intake.grammar_version == f"{NO_GRAMMAR}: nodes with --pp have none"
