"""`baton replay` from files to its exit status: many answers together, a prompt's file, progress, Ctrl-C."""

from __future__ import annotations

import io
import itertools
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from deploy import cli
from deploy.tools.certify import run
from deploy.tools.certify.formats import weight_format, with_certified_formats
from deploy.tools.certify.progress import LINE_S, ReplayProgress
from deploy.tools.certify.prompt_file import GivenPrompts, prompts_in
from deploy.tools.certify.settings import ReplayConfig
from deploy.tools.certify.shown_files import shown_in
from deploy.tools.certify.shown_text import Speller
from router.certify.record import AnswerRecord, BadCertificate, CertifiedNumerics, ChoiceFacts, ShownAnswer
from router.certify.signing import read_record
from router.text.hashlm import HashTokenizer
from shared.config.load import load
from shared.config.settings.text_settings import TextConfig
from shared.core.sampling_params import SamplingParams
from shared.model.formats.opened import FIXED_END, HASH_ENDS
from shared.node.assembly.fingerprint import make_fingerprint
from shared.node.records.core import NodeCore
from tests.support.cores.certified import choice_facts, shown_of
from tests.support.cores.certified_replays import SIGNER, write_log
from tests.support.cores.core_rig import CoreKnobs, Job, make_core, name_of, run_local

PAGE = 16
SMALL = ("--model", "hashlm", "--kv-bytes", "4MiB", "--device", "inline")


@pytest.fixture(scope="module")
def facts() -> list[ChoiceFacts]:
    """Of six answers of HashLM."""
    core = make_core(CoreKnobs(spec="none", page_size=PAGE))
    sampling = SamplingParams(max_tokens=6, temperature=0.8)
    jobs = [Job(n, (5, 6, 7, n), sampling, n) for n in range(6)]
    try:
        streams = run_local(core, jobs).streams
        node = make_fingerprint(core.spec, core.pool.planes, PAGE, None, "build")
    finally:
        core.close()
    return [
        choice_facts(
            job.prompt, streams[name_of(job.request().key)], node=node, sampling=sampling, seed=job.seed,
            answer=f"cmpl-{job.rid}",
        )
        for job in jobs
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's core plan is for a process of its own."""
    monkeypatch.setattr(run.core_plan, "apply", lambda plan: None)


def replayed(tmp_path: Path, shown: list[ShownAnswer], *flags: str) -> int:
    return cli.main(["replay", *write_log(tmp_path, shown), *SMALL, *flags])


def test_a_log_s_failures_are_named(
    tmp_path: Path, facts: list[ChoiceFacts], capsys: pytest.CaptureFixture[str]
) -> None:
    """A router that lies; nodes of before an update; tokens that were changed; a prompt that nobody shows."""
    lie = msgspec.structs.replace(facts[1], token_ids=[*facts[1].token_ids[:-1], 3, 3][:6])
    before = msgspec.structs.replace(facts[2], nodes=[msgspec.structs.replace(facts[2].nodes[0], numerics=1)])
    shown = [shown_of(SIGNER, one) for one in (facts[0], lie, before, *facts[3:])]
    shown[3] = msgspec.structs.replace(shown[3], token_ids=[1, 2, 3])
    shown[4] = msgspec.structs.replace(shown[4], prompt_token_ids=None)
    assert replayed(tmp_path, shown) == 1
    *lines, summary = capsys.readouterr().out.splitlines()
    log = f"{tmp_path / 'log'}, answer"
    assert summary.startswith("2 equal, 2 different, 2 not computed: 24 tokens in ")
    assert "answers/s" in summary
    for line, name, words in zip(
        sorted(lines),
        (2, 3, 4, 5),
        ("DIFFERS: token 5", "numerics is 1", "NOT CERTIFIED", "--prompt FILE"),
        strict=True,
    ):
        assert line.startswith(f"{log} {name}: ") and words in line, line
    assert replayed(tmp_path, [shown[0], shown[2]]) == 2
    assert replayed(tmp_path, [shown[0], shown[5]]) == 0


def test_ctrl_c_tells_what_was_computed(
    tmp_path: Path, facts: list[ChoiceFacts], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is closed nevertheless."""
    step, close, steps = NodeCore.step, NodeCore.close, itertools.count()
    closed: list[None] = []

    def stepping(self: NodeCore, block: bool = False) -> bool:
        if next(steps) == 13:  # one answer takes six
            signal.raise_signal(signal.SIGINT)
        return step(self, block)

    def closing(self: NodeCore) -> None:
        close(self)
        closed.append(None)

    monkeypatch.setattr(NodeCore, "step", stepping)
    monkeypatch.setattr(NodeCore, "close", closing)
    assert replayed(tmp_path, [shown_of(SIGNER, one) for one in facts], "--max-running", "1") == 130
    assert capsys.readouterr().out.startswith("interrupted after 2: 2 equal, 0 different, 0 not computed: 12 ")
    assert closed


def test_progress_is_told_now_and_then() -> None:
    """Without a terminal: a line after LINE_S, and none before."""
    told, times = io.StringIO(), itertools.count(0.0, LINE_S / 2)
    progress = ReplayProgress(Console(file=told), lambda: next(times))
    for _ in range(5):
        progress.counts.add(True)
        progress.counts.tokens += 10
        progress.pass_one()
    assert told.getvalue().splitlines() == [
        "2 replayed: 2 equal, 0 different, 0 not computed (2 tokens/s, 0.2 answers/s)",
        "4 replayed: 4 equal, 0 different, 0 not computed (2 tokens/s, 0.2 answers/s)",
    ]


# A prompt's file


def record_of(prompts: GivenPrompts, **changes: Any) -> tuple[AnswerRecord, bytes]:
    facts = choice_facts(prompts.ids[0], templates=prompts.templates or {"default": "x"})
    shown = shown_of(SIGNER, msgspec.structs.replace(facts, **changes))
    return read_record(shown.record)[1], shown.salt_bytes


def given(tmp_path: Path, text: str) -> GivenPrompts:
    (tmp_path / "prompt").write_text(text)
    return prompts_in(tmp_path / "prompt", "smollm2", TextConfig())


def chat(text: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 5})


def test_a_changed_prompt_or_template_is_named(tmp_path: Path) -> None:
    prompts = given(tmp_path, chat("Name three rivers."))
    record, salt = record_of(prompts)
    assert prompts.certified(record, salt) == prompts.ids[0] and prompts.templates
    with pytest.raises(BadCertificate, match="the chat template"):
        prompts.certified(*record_of(prompts, templates={"default": prompts.templates["default"] + " "}))
    other = given(tmp_path, chat("Name three lakes."))
    with pytest.raises(BadCertificate, match=f"not the certified prompt of {record.prompt.count} tokens"):
        other.certified(record, salt)


@pytest.mark.parametrize("form", ["{}", '{{"prompt": "{}"}}'])
def test_a_text_needs_no_template(tmp_path: Path, form: str) -> None:
    prompts = given(tmp_path, form.format("Once upon a time"))
    record, salt = record_of(prompts, templates={"default": "any"})
    assert prompts.certified(record, salt) == prompts.ids[0]
    with pytest.raises(BadCertificate, match="not the certified prompt"):
        given(tmp_path, form.format("Once upon a line")).certified(record, salt)


def test_a_prompt_s_file_is_compared_with_shown_ids_too(
    tmp_path: Path, facts: list[ChoiceFacts], capsys: pytest.CaptureFixture[str]
) -> None:
    """HashLM's text of the ids 5, 6, 7, 0 is `%&' `."""
    for text, code in (("%&' ", 0), ("%&'", 1)):
        (tmp_path / "prompt").write_text(text)
        assert replayed(tmp_path, [shown_of(SIGNER, facts[0])], "--prompt", str(tmp_path / "prompt")) == code
    assert "NOT CERTIFIED: --prompt is not the certified prompt of 4 tokens" in capsys.readouterr().out


# The text beside the ids


def text_ids(text: str) -> list[int]:
    return [ord(char) - 32 for char in text]


@pytest.mark.parametrize(
    ("text", "changes", "is_right"),
    [
        ("Nile", {}, True),
        ("Nilo", {}, False),
        ("Nil", {}, False),
        ("Nil", {"stops": ("e",)}, True),
        ("il", {"stops": ("e",)}, False),
        ("name:Nile", {}, True),
        ("game:Nile", {}, False),
        ("", {}, False),
    ],
)
def test_a_text_is_what_its_ids_spell(text: str, changes: dict[str, Any], is_right: bool) -> None:
    """The last token is a stop token, which HashLM's tokenizer spells as nothing."""
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(95,))
    facts = choice_facts(text_ids("name:"), [*text_ids("Nile"), 95], sampling=sampling, **changes)
    shown = msgspec.structs.replace(shown_of(SIGNER, facts), text=text)
    record, speller = read_record(shown.record)[1], Speller(HashTokenizer())
    for part in ({}, {"token_ids": None}, {"text": None}):
        one = msgspec.structs.replace(shown, **part)
        if is_right or part:
            speller.check_text(one, record, facts.prompt_ids)
        else:
            with pytest.raises(BadCertificate, match="not what its token ids spell"):
                speller.check_text(one, record, facts.prompt_ids)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([{"text": "Ni"}, {"text": "le"}], "Nile"),
        ([{"message": {"content": "Nile"}}], "Nile"),
        ([{"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "Nile"}}, {"delta": {}}], "Nile"),
        ([{"delta": {"content": "Nile"}}, {"delta": {"tool_calls": [{"index": 0}]}}], None),
        ([{"message": {"content": "Nile", "reasoning_content": "a river"}}], None),
        ([{"message": {"content": None, "tool_calls": [{}]}}], None),
        ([{}], None),
    ],
)
def test_a_saved_answer_s_text_is_put_together(pieces: list[dict[str, Any]], text: str | None) -> None:
    """Calls and reasoning are not all that the ids spell."""
    (shown,) = shown_in(iter([{"id": "a", "choices": [piece]} for piece in pieces]))
    assert shown.text == text


def test_a_doctored_text_is_named(tmp_path: Path, facts: list[ChoiceFacts], capsys: pytest.CaptureFixture[str]) -> None:
    right = "".join(chr(32 + one) for one in facts[0].token_ids)
    shown = shown_of(SIGNER, facts[0])
    assert replayed(tmp_path, [msgspec.structs.replace(shown, text=text) for text in (right, right[:-1] + "~")]) == 1
    said = capsys.readouterr().out
    assert "answer 2: NOT CERTIFIED: the text saved with it" in said and "1 equal, 1 different" in said


# Formats


def test_the_certificate_s_formats_are_taken() -> None:
    """On another machine `auto` chooses others. What a flag asks for stays."""
    config = load(ReplayConfig, {})
    node = CertifiedNumerics(
        7, "m", f"1dff file codes{FIXED_END}", "float32", "kv:2x16:torch.int8;scales:2:torch.float32"
    )
    taken = with_certified_formats(config, node)
    model = taken.model
    assert (model.dtype, model.weight_dtype, model.kv_dtype, model.model_library) == (
        "float32",
        "codes",
        "int8",
        "auto",
    )
    assert taken.sched.deterministic and not config.sched.deterministic
    by_library = replace_node(node, weights="1dff by transformers 5.24.0", pages="kv:2x16:torch.bfloat16")
    model = with_certified_formats(config, by_library).model
    assert (model.weight_dtype, model.kv_dtype, model.model_library) == ("auto", "auto", "transformers")
    asked = replace(config, model=replace(config.model, weight_dtype="file"))
    assert with_certified_formats(asked, node).model.weight_dtype == "file"
    assert with_certified_formats(config, replace_node(node, dtype="int")) is config


def replace_node(node: CertifiedNumerics, **changes: Any) -> CertifiedNumerics:
    return msgspec.structs.replace(node, **changes)


@pytest.mark.parametrize("form", HASH_ENDS)
@pytest.mark.parametrize("more", ["", FIXED_END, ", attention of flashinfer 0.6"])
def test_a_weights_digest_names_its_format(form: str, more: str) -> None:
    assert weight_format(f"1dff70{HASH_ENDS[form]}{more}") == form
