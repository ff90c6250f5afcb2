"""Which format of calls and which tags of thoughts a model has, told by its chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.text.chat_template import JinjaTemplate
from router.text.conversation import Conversation
from router.tools.formats import BY_NAME, FORMATS, tool_format
from router.tools.reasoning import TAGS, Thought, ThoughtTags, thought_of, thought_tags
from shared.core.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "data" / "templates"
SEED, THINK, BRACKETS = TAGS
EXPECTED: dict[str, tuple[str | None, ThoughtTags | None]] = {
    "Apertus-8B-Instruct": (None, None),
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", None),
    "ByteDance-Seed-OSS": ("seed_oss", SEED),
    "GLM-4.6": (None, THINK),
    "GLM-4.7-Flash": (None, THINK),
    "GigaChat3-10B-A1.8B": (None, None),
    "GigaChat3.1-10B-A1.8B": (None, None),
    "HuggingFaceTB-SmolLM3-3B": (None, THINK),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M1": (None, None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral_args", None),
    "Qwen-QwQ-32B": ("hermes", THINK),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", THINK),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", THINK),
    "StepFun3.5-Flash": ("qwen3_coder", THINK),
    "baton-features": (None, None),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (None, THINK),
    "deepseek-ai-DeepSeek-V3.1": (None, THINK),
    "deepseek-ai-DeepSeek-V3.2": (None, THINK),
    "google-gemma-4-31B-it": (None, None),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", THINK),
    "ibm-granite-granite-4.0": ("hermes", None),
    "ibm-granite-granite-4.1": ("hermes", None),
    "llama-cpp-deepseek-r1": (None, THINK),
    "llama-cpp-rwkv-world": (None, THINK),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral_args", BRACKETS),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "openai-gpt-oss-120b": (None, None),
    "unsloth-Apriel-1.5": ("apriel", None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral_args", None),
}


def sources_of(name: str) -> dict[str, str]:
    return {"default": (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")}


def test_the_table_names_every_template() -> None:
    assert sorted(EXPECTED) == sorted(path.stem for path in FOLDER.glob("*.jinja"))


@pytest.mark.parametrize("name", EXPECTED)
def test_templates_tell_their_format_and_tags(name: str) -> None:
    row = tool_format(sources_of(name))
    assert (row.name if row else None, thought_tags(sources_of(name))) == EXPECTED[name]


@pytest.mark.parametrize(
    "text, name",
    [
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        ("""'<|python_tag|>' ~ '{"name": "' ~ call.name ~ '", ' ~ '"parameters": ' ~ call.arguments""", "llama3_json"),
        ("put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("{{ messages }}", None),
    ],
)
def test_formats_of_templates_that_are_not_at_hand(text: str, name: str | None) -> None:
    row = tool_format({"default": text})
    assert (row.name if row else None) == name


def test_the_template_for_tools_counts() -> None:
    sources = {"default": "{{ messages }}", "tool_use": "[TOOL_CALLS]"}
    row = tool_format(sources)
    assert row is not None and row.name == "mistral" and row.has_short_ids


def test_a_name_wins() -> None:
    assert tool_format(sources_of("Qwen3-Coder"), "pythonic") is BY_NAME["pythonic"]
    assert tool_format({}, "hermes") is BY_NAME["hermes"]
    assert tool_format({}) is None
    with pytest.raises(ConfigError, match="hermes"):
        tool_format({}, "xml")


def test_markers_are_what_may_be_a_special_token() -> None:
    assert BY_NAME["mistral_args"].markers == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
    assert BY_NAME["hermes"].markers == {"<tool_call>", "</tool_call>"}
    assert len(BY_NAME) == len(FORMATS)


def prompt_of(name: str, **kwargs: bool) -> str:
    template = JinjaTemplate(sources_of(name), {"bos_token": "<s>", "eos_token": "</s>"}, {})
    messages = [{"role": "user", "content": "What is <think>?"}]
    return template.render(Conversation(messages, kwargs=kwargs))


@pytest.mark.parametrize(
    "name, kwargs, expected",
    [
        ("Qwen-Qwen3-0.6B", {}, Thought(THINK, is_open=False)),
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, None),
        ("Qwen-QwQ-32B", {"enable_thinking": True}, Thought(THINK, is_open=True)),
        ("Qwen3.5-4B", {}, Thought(THINK, is_open=True)),
        ("Qwen3.5-4B", {"enable_thinking": False}, None),
        ("GLM-4.7-Flash", {}, Thought(THINK, is_open=True)),
        ("GLM-4.7-Flash", {"enable_thinking": False}, None),
        ("GLM-4.6", {}, Thought(THINK, is_open=False)),
        ("llama-cpp-deepseek-r1", {}, Thought(THINK, is_open=True)),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": True}, Thought(THINK, is_open=True)),
        ("deepseek-ai-DeepSeek-V3.1", {}, None),
        ("HuggingFaceTB-SmolLM3-3B", {"enable_thinking": False}, None),
        ("StepFun3.5-Flash", {}, Thought(THINK, is_open=True)),
        ("mistralai-Ministral-3-14B-Reasoning-2512", {}, Thought(BRACKETS, is_open=False)),
        ("Qwen-Qwen2.5-7B-Instruct", {}, None),
    ],
)
def test_the_prompt_tells_whether_the_thought_is_open(
    name: str, kwargs: dict[str, bool], expected: Thought | None
) -> None:
    assert thought_of(sources_of(name), prompt_of(name, **kwargs)) == expected


@pytest.mark.parametrize(
    "continued, expected",
    [
        ("<think>\nI was", Thought(THINK, is_open=True)),
        ("<think>\nI was\n</think>\n\nYes", None),
        ("Yes", None),
    ],
)
def test_an_answer_that_is_continued_goes_on_with_its_thought(continued: str, expected: Thought | None) -> None:
    assert thought_of(sources_of("Qwen-Qwen3-0.6B"), "...assistant\n" + continued, continued) == expected
