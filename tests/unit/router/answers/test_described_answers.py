"""A model folder with `response_template`: what the router finds at start, plans for chats, and reads of answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from router.api.answer.choice_text import ChoiceText
from router.api.answer.generation_plan import Contexts, GenerationPlan
from router.api.ask.answer_form import special_tokens
from router.api.ask.resolve import Resolver
from router.api.fields.parse import BodyParser
from router.api.openai.chat import CHAT, Chat
from router.app import tell_speech
from router.text.folder_tokenizer import load_folder
from router.text.hashlm import hash_text_model
from router.tools.calls.deltas import WholeAnswer, whole_answer
from router.tools.calls.formats import BY_NAME
from router.tools.detect import Speech, speech_of
from router.tools.response_template import response_template_of
from shared.config.settings.settings import LimitsConfig
from shared.config.settings.text_settings import TextConfig
from shared.core.errors import InvalidRequest
from shared.core.states import FinishReason
from tests.unit.router.answers.test_answer_form import JSON, TOOL, follows

SPECS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "data" / "response_templates.json").read_text())
LINES = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
OWN = SPECS["lines"]["fields"]
SPEC = {"start_anchor": "<bot>", "fields": {"thinking": {"open": "<t>", "close": "</t>"}, **OWN}}
CALL = "<call=f>\n</call>"


def folder_speech(folder: Path, spec: object, end: str = "<bot>", asked: str = "", template: str = LINES) -> Speech:
    Tokenizer(BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    own = {"chat_template": template + end, "response_template": spec}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "config.json").write_text('{"max_position_embeddings": 64, "model_type": "llama"}')
    return speech_of(load_folder(folder, TextConfig()), asked)


def plan_of(speech: Speech, **fields: Any) -> GenerationPlan:
    text = replace(speech.text, tokenizer=hash_text_model().tokenizer, control_tokens=None)
    resolver = Resolver("m", text, LimitsConfig(), calls=speech.calls, template=speech.template)
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return Chat().plan(BodyParser(CHAT).parse(json.dumps(body).encode()).body, resolver, Contexts(4096, 4096))


def read(plan: GenerationPlan, text: str) -> tuple[WholeAnswer, ChoiceText]:
    choice = ChoiceText(hash_text_model().tokenizer, plan.sampling, plan.show)
    parts = []
    for char in text:
        parts += choice.feed([ord(char) - 32], []).parts
    return whole_answer(parts + choice.finish(FinishReason.STOP).parts), choice


def test_what_the_model_says_counts_if_no_row_knows_it(tmp_path: Path) -> None:
    speech = folder_speech(tmp_path, SPEC)
    assert speech.calls is None and speech.template is not None and speech.source == "response_template"
    asked = folder_speech(tmp_path, SPEC, asked="hermes")
    assert asked.calls is BY_NAME["hermes"] and asked.template is None
    signed = folder_speech(tmp_path, SPEC, template=LINES + "<tool_call> {'name'<function=<parameter=")
    assert signed.calls is BY_NAME["qwen3_coder"] and signed.template is None


def test_a_template_of_no_use_stops_no_router(tmp_path: Path) -> None:
    speech = folder_speech(tmp_path, {"fields": 1})
    assert speech.calls is None and speech.template is None and "fields" in speech.problem
    heard: list[tuple[str, str, dict[str, object]]] = []

    class Log:
        def warning(self, words: str, **more: object) -> None:
            heard.append(("warning", words, more))

        info = warning

    tell_speech(Log(), speech)  # type: ignore[arg-type]
    assert ("fields" in str(heard[0][2])) and len(heard) == 2
    heard.clear()
    tell_speech(Log(), folder_speech(tmp_path, SPEC))  # type: ignore[arg-type]
    assert [more for _, _, more in heard] == [{"thoughts": True, "calls": True}]


def test_the_prompt_may_open_the_thought(tmp_path: Path) -> None:
    answer, choice = read(plan_of(folder_speech(tmp_path, SPEC, "<bot><t>")), "so</t>Hm")
    assert answer == WholeAnswer("Hm", "so", ()) and choice.num_reasoning >= 2


def test_a_call_arrives_and_no_call_is_enforced(tmp_path: Path) -> None:
    spec = {
        **SPEC,
        "fields": {"tool_calls": {**OWN["tool_calls"], "open_pattern": "<call=(?P<name>\\w+)>"}, "content": {}},
    }
    speech = folder_speech(tmp_path, spec)
    answer, choice = read(plan_of(speech, tools=[TOOL]), "Hm <call=f></call>")
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", "{}")] and choice.has_calls
    for wanted in ("required", {"type": "function", "function": {"name": "f"}}):
        with pytest.raises(InvalidRequest, match="response_template"):
            plan_of(speech, tools=[TOOL], tool_choice=wanted)
    answer, _ = read(plan_of(speech, tools=[TOOL], tool_choice="none"), "<call=f></call>")
    assert answer == WholeAnswer("<call=f></call>", "", ())


def test_a_schema_holds_behind_the_thought(tmp_path: Path) -> None:
    grammar = plan_of(folder_speech(tmp_path, SPEC), **JSON).sampling.grammar
    assert follows(grammar, '<t>a { b</t> {"a": 1}') and follows(grammar, '{"a": 1}') and not follows(grammar, "no")
    opened = plan_of(folder_speech(tmp_path, SPEC, "<bot><t>"), **JSON).sampling.grammar
    assert follows(opened, 'so</t>{"a": 1}') and not follows(opened, '{"a": 1}')
    thinking = {"open_pattern": "<t>", "close_pattern": "</t>"}
    speech = folder_speech(tmp_path, {**SPEC, "fields": {**SPEC["fields"], "thinking": thinking}}, "<bot><t>")
    assert plan_of(speech).show.form.is_in_thought
    with pytest.raises(InvalidRequest, match="how it ends"):
        plan_of(speech, **JSON)


def test_special_tokens_in_patterns_reach_the_reader() -> None:
    class Facts:
        special_ids = frozenset({0, 1, 2})

    class Special:
        facts = Facts()

        def token_bytes(self, token_id: int) -> bytes:
            return [b"<|channel|>", b"<|return|>", b"<|pad|>"][token_id]

    template = response_template_of(SPECS["harmony"])
    assert special_tokens(Special(), template.markers) == {"<|channel|>": 0, "<|return|>": 1}  # type: ignore[arg-type]
