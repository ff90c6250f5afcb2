"""Data, runs that stop and go on, and heads on their way out and in."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.tools.head import chart, work
from deploy.tools.head.answers import InventedPrompt, answer, invent, mend, prompt_ids, read_prompts, user_turn
from deploy.tools.head.command import WORDS
from deploy.tools.head.data import TrainingAnswer, is_held_out, read_answers, split
from deploy.tools.head.generate import Generator, Task
from deploy.tools.head.measure import OWN_PROMPTS, read_kinds
from deploy.tools.head.settings import (
    DataSettings,
    ExportConfig,
    ExportSettings,
    ImportConfig,
    ImportSettings,
    Recipe,
    RunSettings,
    TrainConfig,
    TrainingMachine,
)
from deploy.tools.head.target import TargetNet
from deploy.tools.head.train import CHAIN, Progress, Run
from router.text.hashlm import hash_text_model
from shared.core.errors import ConfigError
from shared.model.eagle_file import HeadFolder
from shared.model.hashlm.model import HashLM
from shared.model.load import load_model
from shared.model.opened import LoadOptions, open_model
from tests.support.draft_head import VOCAB, save_target

RECIPE = Recipe(steps=2, epochs=2.0, batch_tokens=40, draft_vocab=30, rate=1e-2)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("target")
    save_target(made, "odd")
    return made


def made_answers(count: int) -> list[TrainingAnswer]:
    draw = torch.Generator().manual_seed(1)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (), generator=draw))
        return tuple(torch.randint(0, VOCAB, (length,), generator=draw).tolist())

    return [TrainingAnswer(ids(2, 8), ids(8, 20), float(n % 2)) for n in range(count)]


def write(path: Path, answers: Sequence[TrainingAnswer]) -> Path:
    lines = [json.dumps({"p": one.prompt, "a": one.answer, "t": one.temperature}) for one in answers]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def start(folder: Path, tmp_path: Path, recipe: Recipe = RECIPE) -> Run:
    answers = write(tmp_path / "answers.jsonl", made_answers(60))
    source = open_model(folder)
    target = TargetNet(source, torch.float32, CPU, 64)
    return Run(source, recipe, RunSettings((str(answers),), str(tmp_path / "work"), 0.0, 4), target)


class Stopped(Exception):
    pass


def stop_after(updates: int) -> object:
    seen: list[Progress] = []

    def told(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == updates:
            raise Stopped

    return told


def test_a_run_that_was_stopped_ends_with_the_same_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = start(folder, tmp_path / "a")
    whole.go(lambda _: None)
    for updates in (3, 9):
        with pytest.raises(Stopped):
            start(folder, tmp_path / "b").go(stop_after(updates))  # type: ignore[arg-type]
    broken = start(folder, tmp_path / "b")
    assert 0 < broken.learner.position.updates < whole.learner.position.updates
    broken.go(lambda _: None)
    for name, value in whole.learner.masters.items():
        assert torch.equal(value, broken.learner.masters[name]), name
    curves = [chart.read_curve(tmp_path / side / "work" / "curve.jsonl") for side in "ab"]
    kept = [[{**line, "seconds": 0} for line in curve] for curve in curves]
    assert kept[0] == kept[1] and any("held_out" in line for line in kept[0])


def test_a_run_goes_on_only_with_what_ordered_it(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        start(folder, tmp_path).go(stop_after(2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_tokens 40"):
        start(folder, tmp_path, replace(RECIPE, batch_tokens=41))
    start(folder, tmp_path, replace(RECIPE, steps=3, rate=1e-3, epochs=9.0))


def test_the_word_takes_several_files_and_draws(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = made_answers(60)
    files = tuple(str(write(tmp_path / name, part)) for name, part in (("a", answers[:25]), ("b", answers[25:])))
    machine = TrainingMachine(model=str(folder), dtype="float32")
    work.train(TrainConfig(RunSettings(files, str(tmp_path / "work"), 60.0, 2), replace(RECIPE, epochs=1.0), machine))
    total = sum(len(one.answer) - 1 for one in split(answers, 0, 1024).training)
    said = capsys.readouterr()
    assert f"{total:,} answer tokens to train on" in said.out and "tokens per verify" in said.out
    assert f"{total:,} of {total:,} answer tokens" in said.err
    loss, accepted = ((tmp_path / "work" / f"{name}.svg").read_text() for name in ("loss", "acceptance"))
    assert loss.count("<polyline") == RECIPE.steps and accepted.count("<polyline") == CHAIN


def test_no_held_out_prompt_is_trained_on() -> None:
    answers = made_answers(600)
    parts = split(answers, 0, 1024)
    assert parts.held_out and len(parts.held_out) + len(parts.training) == len(answers)
    assert not {one.prompt for one in parts.held_out} & {one.prompt for one in parts.training}
    assert all(is_held_out(one.prompt) for one in parts.held_out)
    again = split([*answers, *made_answers(10)], 7, 1024)  # another seed, more data: the same side
    assert {one.prompt for one in again.held_out} == {one.prompt for one in parts.held_out}


def test_training_takes_from_the_training_side_only(folder: Path, tmp_path: Path) -> None:
    run = start(folder, tmp_path)
    seen: list[tuple[int, ...]] = []
    update = run.learner.update

    def watched(traces, share):  # type: ignore[no-untyped-def]
        seen.extend(tuple(trace.ids[: trace.prompt].tolist()) for trace in traces)
        return update(traces, share)

    run.learner.update = watched  # type: ignore[method-assign]
    run.go(lambda _: None)
    assert len(seen) == 2 * len(run.parts.training) and not any(map(is_held_out, seen))


def test_sequences_are_cut_and_short_answers_left_out() -> None:
    answers = [
        TrainingAnswer((1, 2), tuple(range(30)), 0.0),
        TrainingAnswer((3,), (1, 2, 3), 0.0),
        TrainingAnswer((4,) * 20, (5,) * 30, 0.0),
    ]
    kept = [*(parts := split(answers, 0, 24)).training, *parts.held_out]
    assert [len(one.ids) for one in kept] == [24]


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"p": [], "a": [1], "t": 0}', '{"p": [1], "a": ["x"], "t": 0}'])
def test_a_line_that_is_no_answer_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"p": [1], "a": [2], "t": 0}\n' + line.encode()))
    with pytest.raises(ConfigError, match=re.escape(f"{path}:2")):
        read_answers(path)


def export(folder: Path, tmp_path: Path) -> Path:
    with pytest.raises(Stopped):
        start(folder, tmp_path).go(stop_after(3))  # type: ignore[arg-type]
    out = tmp_path / "head"
    machine = TrainingMachine(model=str(folder), dtype="float32")
    work.export(ExportConfig(ExportSettings(str(tmp_path / "work"), str(out)), machine))
    return out


def bring_in(folder: Path, source: Path, out: Path) -> Path:
    work.import_(
        ImportConfig(ImportSettings(str(source), str(out)), TrainingMachine(model=str(folder), dtype="float32"))
    )
    return out


def test_out_and_in_again_is_the_same_head(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = export(folder, tmp_path)
    assert json.loads((out / "recipe.json").read_text())["recipe"]["draft_vocab"] == 30
    target = open_model(folder).config
    found = HeadFolder(out, target)
    run = start(folder, tmp_path)
    assert torch.equal(found.draft_ids, run.learner.words.ids)
    assert replace(found.config, layer=replace(found.config.layer, name=run.config.layer.name)) == run.config
    for name, value in run.learner.weights().items():
        assert torch.equal(found.tensor(name), value), name
    again = bring_in(folder, out, tmp_path / "again")
    assert (again / "config.json").read_bytes() == (out / "config.json").read_bytes()
    assert load_file(again / "model.safetensors").keys() == load_file(out / "model.safetensors").keys()
    assert f"drafts 30 of {VOCAB} ids" in capsys.readouterr().out


def test_other_spellings_come_in_under_the_canonical_names(folder: Path, tmp_path: Path) -> None:
    out = export(folder, tmp_path)
    tensors = load_file(out / "model.safetensors")
    spelled = {f"model.{name.replace('midlayer', 'layers.0')}": value for name, value in tensors.items()}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((out / "config.json").read_bytes())
    save_file(spelled, other / "model.safetensors")
    found = load_file(bring_in(folder, other, tmp_path / "in") / "model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_wrong_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    out = export(folder, tmp_path)
    tensors = load_file(out / "model.safetensors")
    wrong = {
        "midlayer.mlp.up_proj.weight": tensors["midlayer.mlp.up_proj.weight"][:-1].clone(),
        "t2d": ~tensors["t2d"],
        "d2t": tensors["d2t"] + VOCAB,
        "midlayer.self_attn.rogue.weight": torch.zeros(1),
    }
    for name, value in wrong.items():
        save_file({**tensors, name: value}, out / "model.safetensors")
        with pytest.raises(ConfigError, match=re.escape(name)):
            bring_in(folder, out, tmp_path / "in")
    save_file({name: tensors[name] for name in tensors if name != "fc.weight"}, out / "model.safetensors")
    with pytest.raises(ConfigError, match=re.escape("fc.weight")):
        bring_in(folder, out, tmp_path / "in")


def test_rows_of_any_company_say_what_one_alone_says(folder: Path) -> None:
    model = load_model(str(folder), LoadOptions("float32", max_context=64, kernels="torch"))
    tasks = [Task(n, tuple(range(1 + n, 5 + 2 * n)), 0.0, 3 + n) for n in range(6)] + [Task(6, (1,) * 40, 0.0, 3)]
    company, alone = Generator(model, 4, 24, 0, CPU), Generator(model, 1, 24, 0, CPU)
    found = {task.key: made for task, made in company.run(tasks)}
    assert found == {task.key: made for task, made in alone.run(tasks)}
    assert [len(found[n]) for n in range(7)] == [3, 4, 5, 6, 7, 8, 0]
    for generator in (company, alone):
        generator.close()


def test_tasks_that_are_too_long_end_no_run() -> None:
    """They once left their rows empty, and a run without a busy row was over."""
    generator = Generator(HashLM(max_context=128), 2, 96, 0, CPU)
    tasks = [Task(key, (1,) * size, 0.0, 2) for key, size in enumerate((96, 96, 3, 96, 96, 96, 3))]
    made = {task.key: len(ids) for task, ids in generator.run(tasks)}
    generator.close()
    assert made == {0: 0, 1: 0, 2: 2, 3: 0, 4: 0, 5: 0, 6: 2}


def test_answers_go_on_where_they_stopped(tmp_path: Path) -> None:
    text, out = hash_text_model(), tmp_path / "answers.jsonl"
    prompts = [prompt_ids(text, f"question {n}") for n in range(6)]
    wish = InventedPrompt((0.0, 0.8), 12)
    generator = Generator(HashLM(max_context=128), 3, 96, 0, CPU)
    told: list[tuple[int, int]] = []
    answer(generator, prompts[:4], wish, out, lambda done, total: told.append((done, total)))
    assert told[-1] == (4, 4)
    whole = out.read_bytes()
    out.write_bytes(whole + b'{"p": [1, 2')
    answer(generator, prompts, wish, out, lambda done, total: None)
    generator.close()
    assert out.read_bytes().startswith(whole)
    found = read_answers(out)
    assert sorted(one.prompt for one in found) == sorted(prompts)
    assert {one.temperature for one in found} == {0.0, 0.8} and all(one.answer for one in found)


def test_prompts_are_invented_once(tmp_path: Path) -> None:
    text, path = hash_text_model(), tmp_path / "invented.jsonl"
    generator = Generator(HashLM(max_context=512), 4, 300, 0, CPU)
    first = invent(generator, text, path, 3, lambda count: None)
    more = invent(generator, text, path, 5, lambda count: None)
    generator.close()
    assert len(set(more)) == 5 and more[:3] == first and read_prompts(path) == more
    assert user_turn(text) == prompt_ids(text, "x")[: len(user_turn(text))]


def test_compressed_answers_are_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match="compressed"):
        mend(tmp_path / "a.jsonl.gz")


def test_our_own_prompts_are_of_five_kinds() -> None:
    kinds = [kind for kind, _ in read_kinds(OWN_PROMPTS)]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("chat", "maths", "summarising", "translation", "retrieval"), 12
    )


@pytest.mark.parametrize("bad", [{"invent": 0}, {"invent": 1, "temperatures": "hot"}])
def test_settings_say_what_is_wrong(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        DataSettings(**bad)  # type: ignore[arg-type]
    assert WORDS.keys() == work.RUNNERS.keys()
