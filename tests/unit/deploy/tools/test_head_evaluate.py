"""`baton head evaluate`: chains of a served head against plain torch, and the answers that they are measured on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from deploy.tools.head import evaluate as head_evaluate
from deploy.tools.head.evaluate import Chains, acceptance, evaluate, walk
from deploy.tools.head.generate import Generator, Task
from deploy.tools.head.settings import AcceptanceSettings, EvaluateConfig, TargetSettings
from router.text.hashlm import hash_text_model
from shared.core.errors import ConfigError
from shared.model.formats.opened import LoadOptions
from shared.model.hashlm.model import HashLM
from shared.model.loading.load import load_eagle_head, load_model
from tests.support.models.draft_head import AUX_LAYERS, PlainHead, head_config, head_tensors, save_head, save_target
from tests.support.models.tiny_t5 import write_tiny_t5

CPU = torch.device("cpu")
STEPS = 3
LENGTHS = ((1, 12), (5, 2), (20, 15))  # ids of prompt and answer; the head's pages hold 16


class Small:
    """A tiny target and head on disk. Each draft id stands for one of three tokens, so that many drafts are right."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.target, self.head = folder / "target", folder / "head"
        self.network = save_target(self.target)
        save_head(self.head, head_tensors(), head_config())
        self.draft_ids = torch.arange(len(head_tensors()["d2t"])) % 3
        embed = self.network.get_input_embeddings().weight.detach()
        self.plain = PlainHead(head_tensors(), head_config(), embed)

    def lengths_by_definition(self, prompt: list[int], answer: list[int]) -> list[int]:
        """Each chain on its own, in whole causal passes."""
        ids = torch.tensor([*prompt, *answer])
        with torch.no_grad():
            seen = self.network(ids[None], output_hidden_states=True).hidden_states
        fc = self.plain.features(torch.cat([seen[n][0] for n in AUX_LAYERS], dim=-1))
        found = []
        for first in range(len(prompt) - 1, len(ids) - 2):
            features, right = fc[: first + 1], 0
            for step in range(min(STEPS, len(ids) - 2 - first)):
                out = self.plain.hidden(ids[1 : first + step + 2], features)[-1:]
                if self.draft_ids[int(self.plain.logits(out).argmax())] != ids[first + step + 2]:
                    break
                right += 1
                features = torch.cat([features, out])
            found.append(right)
        return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


def test_every_chain_is_what_a_server_drafts(small: Small) -> None:
    model = load_model(str(small.target), LoadOptions("float32", max_context=64))
    head = load_eagle_head(str(small.head), "tiny", model)
    head.d2t = small.draft_ids
    chains, draw = Chains(model, head, 64, STEPS, CPU), torch.Generator().manual_seed(3)
    seen = set()
    for p, a in LENGTHS:
        ids = torch.randint(0, 3, (p + a,), generator=draw).tolist()
        found = chains.accept_lengths(ids[:p], ids[p:])
        assert found == small.lengths_by_definition(ids[:p], ids[p:])
        seen |= {*found}
    chains.close()
    assert seen == {0, 1, 2, 3}


def test_a_walk_counts_as_a_server_does() -> None:
    """Ten tokens: the first chain is right twice, the chain after it not at all, then all is right to the end."""
    lengths = [2, 1, 2, 0, 2, 2, 2, 2, 2, 1]
    assert walk(lengths, 3) == (10, 4) and walk([0] * 4, 3) == (4, 4)
    assert walk(lengths, 1) == (10, 5)


def test_a_step_s_share_counts_only_chains_that_reach_it() -> None:
    found = acceptance([[2, 1, 0], [0]], 2)
    assert asdict(found) == {
        "answers": 2,
        "tokens": 4,
        "tokens_per_verify": (4 / 3, 4 / 2),
        "by_step": (2 / 4, 1 / 2),
    }


def test_the_command_prints_every_kind(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"kind": "a", "prompt": "x"}\n{"kind": "b", "prompt": "y"}\n{"kind": "a", "prompt": "z"}\n')
    monkeypatch.setattr(head_evaluate, "load_text_model", lambda name: hash_text_model())
    test = AcceptanceSettings(head=str(small.head), prompts=str(prompts), max_new=8, chain=2, rows=2)
    evaluate(EvaluateConfig(test, TargetSettings(model=str(small.target), dtype="float32")))
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert [line.split()[0] for line in shown[2:]] == ["a", "b", "all"] == list(found)
    assert [found[kind]["answers"] for kind in found] == [2, 1, 3]
    assert all(len(one["tokens_per_verify"]) == len(one["by_step"]) == 2 for one in found.values())


def test_a_model_that_no_head_fits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--model hashlm has no hidden states"):
        evaluate(EvaluateConfig(AcceptanceSettings(), TargetSettings(model="hashlm")))
    write_tiny_t5(tmp_path)
    monkeypatch.setattr(head_evaluate, "load_text_model", lambda name: hash_text_model())
    with pytest.raises(ConfigError, match="models with an encoder"):
        evaluate(EvaluateConfig(AcceptanceSettings(), TargetSettings(model=str(tmp_path), dtype="float32")))


def test_rows_of_any_company_say_what_one_alone_says(small: Small) -> None:
    model = load_model(str(small.target), LoadOptions("float32", max_context=64, kernels="torch"))
    tasks = [Task(n, tuple(range(1 + n, 5 + 2 * n)), 3 + n) for n in range(6)] + [Task(6, (1,) * 40, 3)]
    company, alone = Generator(model, 4, 24, CPU), Generator(model, 1, 24, CPU)
    found = {task.key: made for task, made in company.run(tasks)}
    assert found == {task.key: made for task, made in alone.run(tasks)}
    assert [len(found[n]) for n in range(7)] == [3, 4, 5, 6, 7, 8, 0]
    for generator in (company, alone):
        generator.close()


def test_tasks_that_are_too_long_end_no_run() -> None:
    """They once left their rows empty, and a run without a busy row was over."""
    generator = Generator(HashLM(max_context=128), 2, 96, CPU)
    tasks = [Task(key, (1,) * size, 2) for key, size in enumerate((96, 96, 3, 96, 96, 96, 3))]
    made = {task.key: len(ids) for task, ids in generator.run(tasks)}
    generator.close()
    assert made == {0: 0, 1: 0, 2: 2, 3: 0, 4: 0, 5: 0, 6: 2}
