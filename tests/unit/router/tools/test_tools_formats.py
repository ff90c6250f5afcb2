"""Which format of calls and which tags of thoughts a model has, told by its chat templates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.text.chat.chat_template import JinjaTemplate
from router.text.chat.conversation import Conversation
from router.text.chat.interface import TextModel
from router.text.hashlm import HashTokenizer, hash_text_model
from router.tools.calls.format_row import CallIds
from router.tools.calls.formats import BY_NAME
from router.tools.detect import PROBE, speech_of
from router.tools.reasoning import BRACKETS, THINK, Thought, thought_of, thought_tags
from shared.core.errors import ConfigError
from tests.support.bodies.family_templates import PUBLISHED
from tests.support.bodies.template_turns import names, sources_of, speech, template_of

# What docs/support.md shows of the served families' templates is compared with that page.
EXPECTED: dict[str, tuple[str | None, str | None]] = {  # format of calls; tag that begins a thought
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", "Here are my reasoning steps:\n"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "<think>"),
    "DeepSeek-R1-0528-tools-vllm": ("deepseek_v3", "<think>"),
    "DeepSeek-R1-0528-xinference": ("deepseek_v3", "<think>"),
    "DeepSeek-V3-0324-tools-vllm": ("deepseek_v3", None),
    "DeepSeek-V3-trl": ("deepseek_v3", "<think>"),
    "Gemma-3-pythonic-vllm": ("pythonic", None),
    "GigaChat3-10B-A1.8B": ("gigachat3", None),
    "GigaChat3.1-10B-A1.8B": ("gigachat31", None),
    "Granite-3-tools-vllm": ("granite", None),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "<think>"),
    "Llama-4-json-vllm": ("llama3_json", None),
    "Magistral-Small-2506-mistral-common-v11": ("mistral_args", "<think>"),
    "Magistral-Small-2509-mistral-common-v13": ("mistral_args", "[THINK]"),
    "MiMo-VL": ("hermes", None),
    "MiniMax-M1": ("minimax_m1", None),
    "Mistral-Small-3.1-tools-vllm": ("mistral", None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral_args", None),
    "Phi-4-mini-tools-vllm": ("llama3_json", None),
    "Qwen3.5-4B": ("qwen3_coder", "<think>"),
    "baton-features": (None, None),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("hermes", "<think>"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "<think>"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": ("deepseek_v4", "<think>"),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "<|channel>thought\n"),
    "ibm-granite-granite-4.0": ("hermes", None),
    "inclusionai-ling-3.0-flash": ("glm", "<think>"),
    "internlm2.5-tools-vllm": ("internlm", None),
    "internlm3-8b-instruct": ("hermes", None),
    "llama-cpp-deepseek-r1": ("hermes", "<think>"),
    "llama-cpp-rwkv-world": ("hermes", "<think>"),
    "meetkai-functionary-medium-v3.1": ("functionary", None),
    "meetkai-functionary-medium-v3.2": ("functionary_v32", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "openbmb-MiniCPM5-1B": ("minicpm5", "<think>"),
    "poolside-Laguna-S-2.1": ("glm", "<think>"),
    "poolside-Laguna-XS-2.1": ("glm", "<think>"),
    "poolside-Laguna-XS.2": ("glm", "<think>"),
    "unsloth-Apriel-1.5": ("apriel", "Here are my reasoning steps:\n"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral_args", None),
    "upstage-Solar-Open-100B": ("solar", "<|think|>"),
    "xLAM-2-qwen-tools-vllm": ("xlam", None),
}


def test_the_table_names_every_template() -> None:
    served = {name for of_family in PUBLISHED.values() if isinstance(of_family, tuple) for name in of_family}
    assert sorted(EXPECTED.keys() | served) == names() and not EXPECTED.keys() & served


@pytest.mark.parametrize("name", EXPECTED)
def test_templates_tell_their_format_and_tags(name: str) -> None:
    row, tags = speech(name).calls, thought_tags(sources_of(name))
    assert (row.name if row else None, tags.opening if tags else None) == EXPECTED[name]


@pytest.mark.parametrize(
    "text, name",
    [
        ('{{ tools }} in the format {"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        (
            "{{ tools }} put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]",
            "pythonic",
        ),
        ("{{ tools }} '<function_calls>' '<functions>'", "olmo3"),
        ("{{ tools }} {{ messages }}", None),
    ],
)
def test_formats_of_templates_that_are_not_at_hand(text: str, name: str | None) -> None:
    row = speech_of(with_template(text)).calls
    assert (row.name if row else None) == name


def test_a_special_token_tells_the_format() -> None:
    """LFM2.5's template renders no call, and has no word of how to write one."""
    text = "{{ tools }} {{ messages }}"
    tokenizer = SpecialTokens(["<|tool_call_start|>", "<|tool_call_end|>"])
    model = TextModel(tokenizer, JinjaTemplate({"default": text}, {}, {}))
    row = speech_of(model).calls
    assert row is not None and row.name == "lfm2"


def test_the_template_for_tools_counts() -> None:
    sources = {"default": "{{ messages }}", "tool_use": sources_of("mistralai-Mistral-Nemo-Instruct-2407")["default"]}
    model = TextModel(hash_text_model().tokenizer, template_of(sources))
    row = speech_of(model).calls
    assert row is not None and row.name == "mistral" and row.ids is CallIds.SHORT


def test_a_name_wins() -> None:
    assert speech("Qwen3-Coder").calls is BY_NAME["qwen3_coder"]
    named = speech_of(with_template(sources_of("Qwen3-Coder")["default"]), "pythonic")
    assert named.calls is BY_NAME["pythonic"]
    assert speech_of(hash_text_model(), "hermes").calls is BY_NAME["hermes"]
    assert speech_of(hash_text_model()).calls is None
    with pytest.raises(ConfigError, match="hermes"):
        speech_of(hash_text_model(), "xml")


def test_a_template_that_raises_is_no_reason_not_to_start() -> None:
    for source in ("{{ raise_exception('no') }}{{ tools }}", "{% for i in range(10**9) %}x{% endfor %}{{ tools }}"):
        assert speech_of(with_template(source)).calls is BY_NAME["hermes"]


def test_a_template_that_fails_on_any_tool_gets_tools_as_text() -> None:
    source = "{% if tools %}{{ raise_exception('no') }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    spoken = speech_of(with_template(source))
    assert spoken.calls is BY_NAME["hermes"]
    chat = Conversation([{"role": "user", "content": "Hi"}], tools=[PROBE.for_template()])
    assert "get_weather" in spoken.text.template.render(chat)


def with_template(source: str) -> TextModel:
    return TextModel(hash_text_model().tokenizer, JinjaTemplate({"default": source}, {}, {}))


class SpecialTokens(HashTokenizer):
    """The integer model's tokenizer, with special tokens."""

    def __init__(self, spelled: list[str]) -> None:
        super().__init__()
        self._spelled = spelled
        self.facts = replace(self.facts, special_ids=frozenset(range(len(spelled))))

    def token_bytes(self, token_id: int) -> bytes:
        return self._spelled[token_id].encode()


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
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": True}, Thought(THINK, is_open=True)),
        ("deepseek-ai-DeepSeek-V3.1", {}, None),
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
